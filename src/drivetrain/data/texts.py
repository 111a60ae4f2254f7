"""Reads a table of texts as labelled texts, and reports which rows were dropped and why."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drivetrain.config.bad_rows import most_dropped
from drivetrain.config.workload import TextData
from drivetrain.data.array_store import default_root
from drivetrain.data.bad_rows import BadRow, too_many
from drivetrain.data.data_files import data_files, is_there
from drivetrain.data.encodings import not_utf8
from drivetrain.data.mapped_texts import MappedTexts
from drivetrain.data.split import MOST_OF_A_NAME
from drivetrain.data.table_blocks import IN_BLOCKS
from drivetrain.data.tables import LINES, check_file, column, may_be_hub_id, read_table, with_header_hint
from drivetrain.data.text_rows import WHYS, TextRows, nothing_usable, open_text_rows, place_of_row
from drivetrain.errors import Problem, UserError, clipped, problem, together

if TYPE_CHECKING:
    import pandas as pd  # as in tables.py

ALL_UNLIKE = 0.9  # different labels for each row, from which on they are hardly classes
FEWEST_FOR_COLUMNS = 10  # rows, of which fewer say nothing of their columns


@dataclass(frozen=True)
class Texts:
    """N texts. numbers: (N,) of their labels among `label_names`, which are sorted; rows: (N,) row numbers, from 1.

    store, indices: the store on disk, if any, and the indices of these texts in it (None: all).
    """

    first: Sequence[str]
    second: Sequence[str] | None
    numbers: np.ndarray
    label_names: Sequence[str]
    rows: np.ndarray
    bad: tuple[BadRow, ...] = ()  # rows without text or label or with too few columns, which are not among them
    warning: str | None = None  # where the cache could not be used
    store: TextRows | None = None
    indices: np.ndarray | None = None
    kind: str = "row"  # what `rows` counts: of a file of texts alone, lines

    @property
    def labels(self) -> np.ndarray:
        """The labels as they stand in the file, (N,), as strings."""
        return np.array(self.label_names, dtype=object)[self.numbers]

    def take(self, indices: np.ndarray) -> Texts:
        return replace(
            self,
            first=_taken(self.first, indices),
            second=None if self.second is None else _taken(self.second, indices),
            numbers=self.numbers[indices],
            rows=self.rows[indices],
            bad=(),
            indices=indices if self.indices is None else self.indices[indices],
        )


def _taken(texts: Sequence[str], indices: np.ndarray) -> Sequence[str]:
    return texts.taken(indices) if isinstance(texts, MappedTexts) else [texts[i] for i in indices]


def num_shared(texts: Texts, others: Texts) -> int:
    """Returns how many of the others are among the texts, pairs as pairs."""
    if texts.store is not None and others.store is not None:
        known, asked = (each.store.store.array("hashes") for each in (texts, others))  # type: ignore[union-attr]
        known = known if texts.indices is None else known[texts.indices]
        return int(np.isin(asked if others.indices is None else asked[others.indices], known).sum())
    seen = set(_joined(texts))
    return sum(text in seen for text in _joined(others))


def _joined(texts: Texts) -> Iterable[Any]:
    return texts.first if texts.second is None else zip(texts.first, texts.second, strict=True)


def read_texts(config: TextData, path: str, field: str, labelled: bool = True, split: str = "train") -> Texts:
    """Reads, leaves out rows that cannot be used, and checks. Raises UserError with all problems of the columns at
    once, and for more unusable rows than `bad_rows` allows. Rows without a label are unusable if texts are
    `labelled`."""
    if not labelled and config.text_pair_column is None and Path(path).suffix.lower() == LINES:
        return _lines(path, field)
    wanted: dict[str, str | int] = {"text_column": config.text_column}
    if config.text_pair_column is not None:
        wanted["text_pair_column"] = config.text_pair_column
    if labelled:
        wanted["label_column"] = config.label_column
    if is_on_hub(path):
        texts, warning = _held(path, field, config, wanted, split), None
    else:
        texts, warning = _mapped(path, field, config, wanted)
    if labelled:  # to predict for, each other row has its prediction all the same
        _check_few_are_bad(texts, config, path, field)
    if labelled and split == "train":  # a few evaluation texts may have one of each class
        _check_columns(texts, config)
    return replace(texts, warning=warning)


def is_on_hub(path: str) -> bool:
    """Returns whether a path can only be the id of a data set on the hub."""
    return not is_there(path) and may_be_hub_id(path)


def subset_problems(config: TextData) -> Iterator[Problem]:
    """Returns the problem of a subset where no data come from the hub, which alone has subsets."""
    paths = [path for path in (config.train, config.evaluation) if path is not None]
    if config.subset is not None and not any(map(is_on_hub, paths)):
        why = f"{' and '.join(paths)} {'are' if len(paths) > 1 else 'is'} of this machine, and subsets are the hub's"
        yield Problem("workload.data.subset", why, "leave it out, or give the path of that part")


def _mapped(path: str, field: str, config: TextData, wanted: dict[str, str | int]) -> tuple[Texts, str | None]:
    """Reads a file, a folder of files or a pattern, whose texts are mapped from disk."""
    files = list(data_files(path, field, IN_BLOCKS).values())
    if len(files) == 1:
        check_file(files[0], path if Path(path) == files[0] else str(files[0]), field)
    else:
        together([partial(check_file, file, str(file), field) for file in files])
    root = config.cache or default_root()
    rows, warning = open_text_rows(files, path, field, config.header, wanted, root)
    held = rows.store
    numbers = rows.labels if "labels" in held else np.zeros(len(held.array("rows")), np.int32)
    names = rows.label_names if "labels" in held else [""]
    shards = held.facts["files"]
    lost = zip(*(held.array(name).tolist() for name in ("bad", "bad_lines", "bad_whys")), strict=True)
    bad = tuple(BadRow(place_of_row(row, line, shards, path), WHYS[why]) for row, line, why in lost)
    return Texts(rows.first, rows.second, numbers, names, held.array("rows"), bad, store=rows), warning


def _held(path: str, field: str, config: TextData, wanted: dict[str, str | int], split: str) -> Texts:
    """Reads a hub data set, whose rows are held in memory."""
    table = read_table(path, field, config.header, config.subset, split)
    columns: dict[str, pd.Series] = {}
    problems: list[Problem] = []
    for name, given in wanted.items():
        try:
            columns[name] = column(table, given, path, f"workload.data.{name}")
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(_without_header(problems, columns, table, config))
    return _texts(columns, path, field)


def _without_header(
    problems: list[Problem], found: Sequence[str] | dict[str, Any], table: pd.DataFrame, config: TextData
) -> list[Problem]:
    """Returns the problems; if no column was found at all, with the fix for a file whose first row is data."""
    if found or not config.header:
        return problems
    return with_header_hint(problems, list(table.columns))


def _lines(path: str, field: str) -> Texts:
    """Reads a text a line; lines without one are bad rows."""
    import pandas as pd

    file = Path(path)
    if not file.is_file():
        raise problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
    try:
        # a form feed or U+2028 within a text ends no line, as it does for str.splitlines
        lines = [line.rstrip("\n") for line in io.StringIO(file.read_bytes().decode("utf-8-sig"), newline=None)]
    except UnicodeDecodeError as error:
        raise not_utf8(error, path, field) from None
    return _texts({"text_column": pd.Series(lines, dtype=object)}, path, field, "line")


def _check_few_are_bad(texts: Texts, config: TextData, path: str, field: str) -> None:
    most, bad = most_dropped(config.bad_rows), texts.bad
    problems = too_many(path, bad, len(texts.first) + len(bad), most, field)
    if problems:
        raise UserError(problems)


def _texts(columns: dict[str, pd.Series], path: str, field: str, kind: str = "row") -> Texts:
    first = _strings(columns["text_column"])
    second = _strings(columns["text_pair_column"]) if "text_pair_column" in columns else None
    labels = np.full(len(first), "", dtype=object)
    usable = np.array([bool(text.strip()) for text in first], dtype=bool)
    bad = [(place, WHYS[0]) for place in np.flatnonzero(~usable).tolist()]
    if "label_column" in columns:
        labels = np.array(_strings(columns["label_column"]), dtype=object)
        labelled = np.array([bool(label.strip()) for label in labels], dtype=bool)
        bad += [(place, WHYS[1]) for place in np.flatnonzero(usable & ~labelled).tolist()]
        usable &= labelled
    if not usable.any():
        if kind == "line":
            raise problem(field, f"no line of {path} has a text", "give a text a line")
        raise nothing_usable(path, field, "label_column" in columns)
    names, numbers = np.unique(labels.astype(str), return_inverse=True)
    everything = Texts(first, second, numbers, names.tolist(), np.arange(1, len(first) + 1), kind=kind)
    lost = tuple(BadRow(f"{kind} {place + 1} of {path}", why) for place, why in sorted(bad))
    return replace(everything.take(np.flatnonzero(usable)), bad=lost)


def _strings(values: pd.Series) -> list[str]:
    """Returns strings. Missing values are empty; whole floats that pandas made of integers are integers again."""
    import pandas as pd

    if pd.api.types.is_float_dtype(values) and (values.dropna() % 1 == 0).all():
        values = values.astype("Int64")
    return ["" if pd.isna(value) else str(value) for value in values.astype(object)]


def _check_columns(texts: Texts, config: TextData) -> None:
    """Raises UserError where nearly each row is a class of its own: its labels are texts, as of swapped columns."""
    count, classes = len(texts.numbers), len(np.unique(texts.numbers))
    if count < FEWEST_FOR_COLUMNS or classes < ALL_UNLIKE * count:
        return
    text, label = config.text_column, config.label_column
    if text == label:
        fix = "text_column is the same one: give the column with the classes as label_column"
    elif len(set(texts.first)) <= count / 2:
        fix = f"the columns look swapped: give text_column={label} label_column={text}"
    else:
        fix = "give the column with the classes as label_column"
    example = clipped(" ".join(texts.label_names[texts.numbers[0]].split()), MOST_OF_A_NAME)
    why = f"column {label} has {classes:,} different labels in {count:,} rows, nearly one for each: {example!r}"
    raise problem("workload.data.label_column", why, fix)


def class_names(labels: Collection[str], field: str, count: int | None = None, column: str = "") -> list[str]:
    """Returns the classes, sorted, as numbers if all are. Raises UserError if there is only one. count: samples, if
    `labels` has each once.

    column: of the table that the labels stand in.
    """
    names, count = set(labels), len(labels) if count is None else count
    if len(names) < 2:
        raise problem(
            field,
            f"all {count:,} training samples are of one class, {clipped(next(iter(names)), MOST_OF_A_NAME)!r}",
            "give training data of two classes or more (a part cut off a file that is sorted by label has one)"
            + (f", or the column with the classes as label_column, if {column!r} is not it" if column else ""),
        )
    if len(names) > max(1000, count // 2):
        raise problem(
            field,
            f"{len(names):,} different labels over {count:,} samples: hardly classes",
            (f"give the column with the classes as label_column, if {column!r} is not it; " if column else "")
            + "a number is no class: a model for numbers is a workload of your own (type: module)",
        )
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)


def encode(labels: np.ndarray, names: Sequence[str], path: str, field: str) -> np.ndarray:
    """Returns the numbers of labels. Raises UserError for labels that training does not know."""
    numbers = {name: number for number, name in enumerate(names)}
    unknown = sorted({str(label) for label in labels} - numbers.keys())
    if unknown:
        shown = ", ".join(repr(clipped(label, MOST_OF_A_NAME)) for label in unknown[:5])
        known = ", ".join(clipped(name, MOST_OF_A_NAME) for name in names[:20])
        raise problem(field, f"{path} has labels that the training data lack: {shown}", f"known: {known}")
    return np.array([numbers[label] for label in labels], dtype=np.int64)
