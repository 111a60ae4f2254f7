"""Recognises a user's data by names and first rows: texts with labels, pictures, conversations, plain texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from drivetrain.data.csv_records import separated_otherwise
from drivetrain.data.language.guessed_formats import guessed_messages
from drivetrain.data.language.preference_rows import Preferences
from drivetrain.data.language.prompt_replies import reply_column
from drivetrain.errors import counted, problem

ROWS = 2000  # looked at
LABELS = ("label", "labels", "class", "category", "target", "sentiment", "stars", "rating", "intent", "topic", "y")
TEXTS = ("text", "review", "sentence", "content", "comment", "body", "message", "tweet", "title", "description", "x")
ASKED = ("instruction", "prompt", "question", "query")
ANSWERED = ("output", "response", "answer", "completion", "reply", "solution", "ground_truth")
MOST_CLASSES = 1000
LONG_NAME = 60  # characters: a column's name is shorter
HAN = re.compile(r"[\u4e00-\u9fff]")
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
PLAIN = (".txt", ".md")


@dataclass(frozen=True)
class LabelledTexts:
    """`text`, `label`: names of columns, or positions where the file has no header. sample: texts of the first rows."""

    path: str
    text: str | int
    label: str | int
    header: bool
    rows: int
    classes: tuple[str, ...]
    sample: Sequence[str]
    others: tuple[str, ...] = ()
    unusable: str = ""  # "1 without text, 1 without label"


@dataclass(frozen=True)
class Conversations:
    """formatting: alpaca, sharegpt or openai. columns: alpaca's names → the file's, where these differ."""

    path: str
    formatting: str
    rows: int
    sample: Sequence[str]
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreferenceRows:
    """holds: pairs of a chosen and a rejected answer, or answers labelled as desirable or not. columns: as those of
    `Conversations`; none where the reader finds them."""

    path: str
    holds: Preferences
    rows: int
    sample: Sequence[str]
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Documents:
    """others: columns beside that of the texts, none of which could be labels."""

    path: str
    sample: str
    characters: int
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClassFolders:
    """train: the folder of the classes' folders. sides: (width, height) of some pictures."""

    train: str
    evaluation: str | None
    classes: tuple[str, ...]
    pictures: int
    sides: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class PictureTable:
    path: str
    source: str  # table, or parquet
    image: str
    label: str
    folder: str | None
    classes: tuple[str, ...]
    pictures: int
    sides: Sequence[tuple[int, int]]


Kind = LabelledTexts | Conversations | PreferenceRows | Documents | ClassFolders | PictureTable


def is_chinese(texts: Iterable[str]) -> bool:
    """Returns whether a third of the letters are Chinese characters."""
    text = "".join(islice(texts, 200))[:20_000]
    letters = sum(character.isalpha() for character in text)
    return letters > 0 and len(HAN.findall(text)) > letters / 3


def kind_of(path: Path, text: str | None = None, label: str | None = None) -> Kind:
    """Returns the kind of data at a path. Raises UserError if the kind is unknown.

    text, label: columns that the user names.
    """
    if path.is_dir():
        from drivetrain.init.picture_folders import in_folder

        return in_folder(path)
    if not path.is_file():
        raise problem("--data", f"{path} does not exist", f"relative paths are taken from {Path.cwd()}")
    suffix = path.suffix.lower()
    if suffix in PLAIN:
        content = path.read_text(encoding="utf-8", errors="replace")
        return Documents(str(path), content[:20_000], len(content))
    if suffix not in TABLES:
        known = ", ".join((*TABLES, *PLAIN))
        raise problem(
            "--data", f"{path} ends in {suffix or 'nothing'}", f"give a folder, or a file that ends in {known}"
        )
    return _of_table(path, text, label)


def _of_table(path: Path, text: str | None, label: str | None) -> Kind:
    from drivetrain.data.tables import read_table

    short: list[int] = []
    table = read_table(str(path), "--data", shorter=short)
    kind = _kind_of_table(path, table, text, label, len(short))
    if short and not isinstance(kind, LabelledTexts):
        read_table(str(path), "--data")  # refuses the short rows, as training on data of this kind does
    return kind


def _kind_of_table(path: Path, table: Any, text: str | None, label: str | None, short: int) -> Kind:
    columns = [str(name) for name in table.columns]
    rows = table.head(ROWS).to_dict("records")
    if text is None and label is None:
        from drivetrain.init.preferences import preferences_of

        preferences = preferences_of(path, columns, len(table))
        if preferences is not None:
            return preferences
    for name, formatting in (("messages", "openai"), ("conversations", "sharegpt")):
        if name in columns:
            return Conversations(str(path), formatting, len(table), texts_within(rows))
    pictures = _pictures(path, table, columns, rows, label)
    if pictures is not None:
        return pictures
    asked, answered = named(columns, ASKED), named(columns, ANSWERED)
    if asked and answered and text is None and label is None:
        plain = [_as_lists(row) for row in rows]
        of_messages, reply = guessed_messages(plain, asked, {}), reply_column(plain, True)
        if of_messages is not None and reply is not None:
            own_names = {"messages": asked, "response": reply}
            return Conversations(str(path), of_messages, len(table), texts_within(rows), own_names)
        given = {"prompt": asked, "response": answered}
        own = {"prompt": "instruction", "response": "output"}
        differing = {name: found for name, found in given.items() if found != own[name]}
        return Conversations(str(path), "alpaca", len(table), texts_within(rows), differing)
    return _labelled(path, table, columns, text, label, short)


def _as_lists(value: Any) -> Any:
    """Returns a value of a table with lists in place of arrays, as parquet files have them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _as_lists(each) for name, each in value.items()}
    return [_as_lists(each) for each in value] if isinstance(value, list | tuple) else value


def _labelled(path: Path, table: Any, columns: list[str], text: str | None, label: str | None, short: int = 0) -> Kind:
    hint = separated_otherwise(columns)
    if hint is not None:
        raise problem("--data", f"{path} has a single column, {columns[0]!r}", hint)
    for name in (text, label):
        if name is not None and name not in columns:
            raise problem("--data", f"{path} has no column {name!r}", f"it has: {', '.join(columns[:20])}")
    header = path.suffix.lower() not in (".csv", ".tsv") or _is_header(table, columns)
    if not header:
        from drivetrain.data.tables import read_table

        table = read_table(str(path), "--data", header=False, shorter=[])
    names: list[Any] = list(table.columns)
    own_label = label if label is not None else _label(table, names, text)
    own_text = text if text is not None else _text(table, [name for name in names if name != own_label])
    if own_text is not None and own_label is None and str(own_text).lower() == "text":
        texts = table[own_text].astype(str)
        beside = tuple(str(name) for name in names if name != own_text)
        return Documents(str(path), " ".join(texts.head(200)), int(texts.str.len().sum()), beside)
    if own_text is None or own_label is None:
        what = "no column that could be labels" if own_label is None else "no column of texts"
        fix = "name them: --text-column NAME --label-column NAME"
        if own_label is None and named(columns, ASKED) is not None:
            fix += (
                "; of prompts without answers a model learns by rewards: drivetrain init rewards-grpo --output "
                "run.yaml, and name the file there (workload.data.train) and a reward of yours"
            )
        raise problem("--data", f"{path} has {what}; its columns are {', '.join(columns[:20])}", fix)
    classes = tuple(sorted({str(value) for value in table[own_label].dropna()} - {""}))
    if len(classes) < 2:
        number = "1 class" if classes else "no class"
        why = f"{own_label} of {path} has {number} in {counted(len(table), 'row')}, and there must be two at least"
        raise problem("--data", why, "give more rows, or name another column with --label-column")
    if len(classes) > MOST_CLASSES:
        why = f"{own_label} of {path} has {len(classes):,} different values, no classes"
        raise problem("--data", why, "name another with --label-column")
    sample = [str(value) for value in table[own_text].dropna().sample(min(ROWS, len(table)), random_state=0)]
    others = tuple(str(name) for name in names if name not in (own_text, own_label))
    unusable = _unusable(table[own_text], table[own_label], short)
    return LabelledTexts(str(path), own_text, own_label, header, len(table) + short, classes, sample, others, unusable)


def _unusable(texts: Any, labels: Any, short: int) -> str:
    """Returns how many rows training leaves out or refuses, by reason: "1 without text, 1 without label"."""
    has_text, has_label = (each.notna() & (each.astype(str).str.strip() != "") for each in (texts, labels))
    counts = {
        "without text": int((~has_text).sum()),
        "without label": int((has_text & ~has_label).sum()),
        "with too few columns": short,
    }
    return ", ".join(f"{count:,} {lack}" for lack, count in counts.items() if count)


def _is_header(table: Any, columns: list[str]) -> bool:
    """Returns whether the first row names the columns: names are short, no numbers, and no values of their columns."""
    for name, values in zip(columns, (table[each].head(ROWS) for each in table.columns), strict=True):
        is_value = values.nunique() < len(values) / 2 and name in set(map(str, values))
        if len(name) > LONG_NAME or is_value or re.fullmatch(r"-?\d+(\.\d+)?", name):
            return False
    return True


def named(columns: Sequence[Any], names: Sequence[str]) -> str | None:
    lower = {str(column).lower(): column for column in columns}
    return next((lower[name] for name in names if name in lower), None)


def _label(table: Any, names: list[Any], text: str | None) -> Any:
    """Returns the column with a usual name for labels, else the one with the fewest different values, few for the
    number of rows."""
    plain = [name for name in names if name != text and not _nested(table[name])]
    found = named(plain, LABELS)
    if found is not None:
        return found
    counts = {name: table[name].nunique() for name in plain}
    few = [name for name in plain if 2 <= counts[name] <= min(100, max(2, len(table) // 4))]
    return min(few, key=lambda name: counts[name]) if few and len(plain) > 1 - (text is not None) else None


def _text(table: Any, names: list[Any]) -> Any:
    """Returns the column with a usual name for texts, else the one with the longest values."""
    plain = [name for name in names if not _nested(table[name])]
    found = named(plain, TEXTS)
    if found is not None:
        return found
    lengths = {name: table[name].head(ROWS).astype(str).str.len().mean() for name in plain}
    return max(plain, key=lambda name: lengths[name]) if plain else None


def _nested(values: Any) -> bool:
    return any(isinstance(value, list | dict | bytes) or hasattr(value, "shape") for value in values.head(20))


def _pictures(path: Path, table: Any, columns: list[str], rows: list[Any], label: str | None) -> PictureTable | None:
    """Returns a table of which a column holds encoded pictures or names of picture files, if it is one."""
    from drivetrain.init.picture_folders import column_of_files, encoded_column, sides_of

    source = "parquet" if path.suffix.lower() == ".parquet" else "table"
    image = encoded_column(rows) if source == "parquet" else None
    folder: Path | None = path.parent
    if image is None:
        image, folder = column_of_files(path.parent, columns, rows)
    if image is None or (source == "parquet" and folder is not path.parent):
        return None
    rest = [name for name in columns if name != image]
    own = label if label is not None else _label(table[rest], rest, None) or next(iter(rest), None)
    if own is None:
        raise problem("--data", f"{path} has no column of labels beside {image}", "name it with --label-column")
    classes = tuple(sorted(map(str, table[own].unique())))
    beside = None if folder == path.parent else str(folder)
    sides = sides_of([folder / str(row[image]) for row in rows[:50]]) if source == "table" and folder else ()
    return PictureTable(str(path), source, image, own, beside, classes, len(table), sides)


def texts_within(rows: Iterable[Any]) -> list[str]:
    """Returns all texts of some rows, however deeply they are nested."""
    found: list[str] = []

    def gather(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            for each in value.values():
                gather(each)
        elif isinstance(value, list | tuple) or hasattr(value, "tolist"):
            for each in value if isinstance(value, list | tuple) else value.tolist():
                gather(each)

    for row in islice(rows, 300):
        gather(row)
    return found
