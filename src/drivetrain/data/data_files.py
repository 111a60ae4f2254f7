"""Finds the files of a data set that is named by a path: a file, a folder of files, or a pattern such as
data/*.jsonl.gz."""

from __future__ import annotations

import glob
import json
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath

from drivetrain.config.location import store_address
from drivetrain.data.packed_files import OPENERS, ending, is_packed
from drivetrain.errors import problem

ARCHIVES = (".zip", ".tar", ".tgz", ".7z")
# what the hub and the package datasets put beside the data
BESIDE_DATA = {"readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def is_pattern(path: str) -> bool:
    """Returns whether a path stands for the files that it matches: it has wildcards, and no file or folder has that
    name."""
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def is_there(path: str) -> bool:
    """Returns whether a path names files of this machine or a store, or should: a pattern without a match is no hub
    id."""
    return store_address(path) is not None or is_pattern(path) or Path(path).expanduser().exists()


def data_files(path: str, field: str, endings: Collection[str]) -> dict[str, Path]:
    """Returns name from the folder on → file, sorted. A path of a file is accepted with any ending.

    In a folder, hidden files and a data set's own README.md, dataset_info.json and the like are left out. Raises
    UserError for files that look like part of the data and cannot be read.
    """
    given = Path(path).expanduser()
    if is_pattern(path):
        return _matching(given, path, field)
    return _files_below(given, path, field, endings) if given.is_dir() else {given.name: given}


def _matching(given: Path, path: str, field: str) -> dict[str, Path]:
    parts = given.parts
    fixed = Path(*parts[: next(place for place, part in enumerate(parts) if glob.has_magic(part))])
    found = [Path(each) for each in sorted(glob.glob(str(given), recursive=True))]
    files = {each.relative_to(fixed).as_posix(): each for each in found if each.is_file()}
    if not files:
        what = "folders only" if found else "no file"
        raise problem(field, f"{path} matches {what}", f"patterns are taken from the current folder, {Path.cwd()}")
    return files


def _files_below(folder: Path, path: str, field: str, endings: Collection[str]) -> dict[str, Path]:
    if (folder / "dataset_dict.json").is_file():  # `save_to_disk` of several splits
        splits = sorted(each.name for each in folder.iterdir() if each.is_dir())
        raise problem(field, f"{path} holds several splits", f"give the folder of one: {', '.join(splits)}")
    if (folder / "state.json").is_file():  # `save_to_disk` of one: beside its files may lie what `map` cached
        state = folder / "state.json"
        return {name: folder / name for name in saved_files(state.read_text(encoding="utf-8"), str(state), field)}
    below = {file.relative_to(folder): file for file in sorted(folder.rglob("*"))}
    seen = {place.as_posix(): file for place, file in below.items() if is_of_data(place)}
    _refuse_what_would_be_passed_over(seen, path, field, endings)
    files = {name: file for name, file in seen.items() if ending(file) in endings and file.is_file()}
    if not files:
        known = f"{', '.join(endings)}, compressed also {', '.join(OPENERS)}"
        raise problem(field, f"the folder {path} has no file that can be read", f"files may end in {known}")
    return files


def is_of_data(place: PurePath) -> bool:
    """Returns whether a file of a data set's folder may be data: it is not hidden, and not what lies beside data."""
    return place.name.lower() not in BESIDE_DATA and not any(part.startswith(".") for part in place.parts)


def saved_files(text: str, state: str, field: str) -> list[str]:
    """Returns the files that the state.json of a saved data set names. Raises UserError if it names none."""
    try:
        return [each["filename"] for each in json.loads(text)["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        why = f"{state} does not name the files of the saved data set ({type(error).__name__})"
        raise problem(field, why, "save the data set again, or give the path of one file") from None


def _refuse_what_would_be_passed_over(
    seen: Mapping[str, Path], path: str, field: str, endings: Collection[str]
) -> None:
    """Refuses files that look like part of the folder's data and would not be read."""
    passed = []
    for name, file in seen.items():
        if file.is_symlink() and not file.exists() and ending(file) in endings:
            passed.append(f"{name} (a link that leads nowhere)")
        elif file.is_symlink() and file.is_dir():
            passed.append(f"{name} (a link to a folder)")
        elif file.suffix.lower() in ARCHIVES and Path(file.stem).suffix.lower() in endings and not is_packed(file):
            passed.append(f"{name} (an archive)")
    if passed:
        more = f" and {len(passed) - 5} more" if len(passed) > 5 else ""
        why = f"the folder {path} has {', '.join(passed[:5])}{more}, which cannot be read"
        raise problem(field, why, "unpack archives, give folders that are linked to by themselves, or remove them")
