"""Reads LLaMA-Factory's registry of data sets, dataset_info.json: the meaning of each name (data/README.md there)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.config.files import check_levels
from drivetrain.data.encodings import not_utf8
from drivetrain.data.language.row_schema import TAGS, USED, Formatting, RowSchema, kind
from drivetrain.errors import Problem, UserError, problem

NAME = "dataset_info.json"

SOURCES = ("hf_hub_url", "file_name", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")  # first given wins
OPTIONS = ("formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags")
FORMATTINGS = ("alpaca", "sharegpt", "openai")
FORMER = ("file_sha1",)  # in registries of 2023; it has no effect there either
PICTURES = ("images", "videos", "audios")
COLUMN_NAMES = (
    *("prompt", "query", "response", "history", "messages", "system", "tools"),
    *(*PICTURES, "chosen", "rejected", "kto_tag"),
)
ELSEWHERE = {
    "ms_hub_url": "it is on ModelScope only, and hub ids here are of the Hugging Face hub",
    "om_hub_url": "it is on OpenMind only, and hub ids here are of the Hugging Face hub",
    "script_url": "it is made by a script, which datasets no longer runs",
    "cloud_file_name": "it is in a cloud's storage",
}


@dataclass(frozen=True)
class Entry:
    """One data set. path: its file or folder, or its hub id. ranking: the chosen answers are the replies to train on.

    refusals: (why, what to do) for everything that prevents its use here; `find` raises them.
    """

    name: str
    path: str
    formatting: Formatting = "alpaca"
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    num_samples: int | None = None
    ranking: bool = False
    refusals: tuple[tuple[str, str], ...] = ()

    @property
    def form(self) -> RowSchema:
        """The schema by which its rows are read as conversations."""
        return RowSchema(self.formatting, self.columns, self.tags, self.ranking)


def read_registry(path: str, field: str) -> dict[str, Entry]:
    """Reads a registry. path: the JSON file, or its folder. Files of entries are below that folder.

    An unusable entry is included: `find` raises the reason. Raises UserError if the file itself cannot be read.
    """
    given = Path(path).expanduser()
    file = given / NAME if given.is_dir() else given
    if not file.is_file():
        fix = f"give LLaMA-Factory's {NAME}, or the folder that has it, from the current folder, {Path.cwd()}"
        raise problem(field, f"{file} does not exist", fix)
    try:
        held = json.loads(file.read_bytes().decode("utf-8-sig"))
        check_levels(held)
    except UnicodeDecodeError as error:
        raise not_utf8(error, str(file), field) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise problem(field, f"{file} is broken JSON at {place}: {error.msg}", "correct the file") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise problem(field, f"{file} cannot be read as JSON: {error}", "correct the file") from None
    except OSError as error:
        raise problem(field, f"{file} cannot be read: {error.strerror}", "allow reading it") from None
    if not isinstance(held, dict):
        raise problem(field, f"{file} holds {kind(held)}", 'give an object: {"name": {"file_name": ...}, ...}')
    return {name: _entry(name, given, file.parent) for name, given in held.items()}


def find(registry: Mapping[str, Entry], name: str, field: str) -> Entry:
    """Returns the entry of that name. Raises UserError with the nearest names, or with all reasons that forbid its
    use."""
    entry = registry.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, registry, n=3) or [known for known in registry if name in known][:3]
        fix = f"did you mean {' or '.join(near)}?" if near else f"it has: {', '.join(list(registry)[:20]) or 'nothing'}"
        raise problem(field, f"the registry has no data set {name!r}", fix)
    if entry.refusals:
        raise UserError([Problem(field, f"{name} of the registry: {why}", fix) for why, fix in entry.refusals])
    return entry


Refusals = list[tuple[str, str]]


def _entry(name: str, given: Any, folder: Path) -> Entry:
    if not isinstance(given, dict):
        return Entry(name, "", refusals=((f"it is {kind(given)}", 'give an object: {"file_name": ...}'),))
    refusals: Refusals = _unknown(given, (*SOURCES, *OPTIONS, *FORMER), "")
    path = _path(given, folder, refusals)
    formatting: Any = given.get("formatting") or "alpaca"
    if formatting not in FORMATTINGS:
        refusals.append((f"its formatting is {formatting!r}", f"it may be {', '.join(FORMATTINGS)}"))
        formatting = "alpaca"
    columns = _names(given, "columns", COLUMN_NAMES, refusals)
    tags = _names(given, "tags", tuple(TAGS), refusals)
    _check_columns(columns, formatting, refusals)
    texts = {key: _typed(given, key, str, "a text", refusals) for key in ("subset", "split", "folder")}
    samples = _typed(given, "num_samples", int, "a whole number above 0", refusals)
    return Entry(
        name,
        path,
        formatting,
        columns,
        tags,
        texts["subset"],
        texts["split"] or "train",
        texts["folder"],
        samples,
        bool(_typed(given, "ranking", bool, "true or false", refusals)),
        tuple(refusals),
    )


def _path(given: Mapping[str, Any], folder: Path, refusals: Refusals) -> str:
    """Chooses as LLaMA-Factory does: the hub goes before a file; a file before sources that are not supported here."""
    named = next((key for key in SOURCES if given.get(key)), None)
    if named is None:
        refusals.append(("it names no place of the data", "give file_name or hf_hub_url"))
        return ""
    if not isinstance(given[named], str):
        refusals.append((f"its {named} is {kind(given[named])}", "give a text"))
        return ""
    if named in ELSEWHERE:
        refusals.append((ELSEWHERE[named], "download it, and give its file_name instead"))
    # in full, so that no file that is missing is taken for a hub id
    return str((folder / given[named]).absolute()) if named == "file_name" else str(given[named])


def _names(given: Mapping[str, Any], key: str, known: tuple[str, ...], refusals: Refusals) -> dict[str, str]:
    """Returns columns or tags: name → the data's name for it. null leaves a name out."""
    names = given.get(key) or {}
    if not isinstance(names, dict):
        refusals.append((f"its {key} are {kind(names)}", f"give an object: {{{known[0]!r}: ...}}"))
        return {}
    refusals += _unknown(names, known, f"{key}.")
    for name, called in names.items():
        if called is not None and not isinstance(called, str):
            refusals.append((f"its {key}.{name} is {kind(called)}", "give a name"))
    return {name: called for name, called in names.items() if isinstance(called, str)}


def _check_columns(columns: Mapping[str, str], formatting: str, refusals: Refusals) -> None:
    shown = [name for name in PICTURES if name in columns]
    if shown:
        refusals.append((f"it has {' and '.join(shown)}", "only texts can be trained on: choose a data set of texts"))
    foreign = [name for name in columns if name in {*USED["alpaca"], "messages"} - {*USED[formatting]}]
    if foreign:
        fits = '"sharegpt" or "openai"' if formatting == "alpaca" else '"alpaca"'
        why = f"it names columns.{' and columns.'.join(foreign)}, which the formatting {formatting} does not have"
        refusals.append((why, f'give "formatting": {fits}, or leave them out'))


def _typed(given: Mapping[str, Any], key: str, wanted: type, words: str, refusals: Refusals) -> Any:
    value = given.get(key)
    fits = type(value) is wanted and not (isinstance(value, int) and wanted is int and value < 1)
    if value is None or fits:
        return value
    refusals.append((f"its {key} is {value!r}", f"give {words}"))
    return None


def _unknown(given: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> Refusals:
    refusals = []
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            refusals.append((f"it has the unknown key {prefix}{key}", fix))
    return refusals
