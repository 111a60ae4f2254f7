"""Images and labels: bundled digits, class folders, tables of files, CIFAR-10 pickles, tars, parquet, hub data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drivetrain.config.bad_rows import most_dropped
from drivetrain.config.workload import ImageData
from drivetrain.data.array_store import default_root
from drivetrain.data.bad_rows import by_reason, too_many
from drivetrain.data.cifar import stored_cifar10
from drivetrain.data.image_folders import is_hidden
from drivetrain.data.image_tars import TarPictures, tar_pictures
from drivetrain.data.images import (
    ArrayPictures,
    EncodedPictures,
    LabelledPictures,
    Pictures,
    file_pictures,
    image_suffixes,
    labelled,
)
from drivetrain.data.packed_files import ending
from drivetrain.data.picture_listing import Listing, listed
from drivetrain.data.shard_paths import is_pattern
from drivetrain.errors import UserError, counted, problem

TABLES = (".csv", ".tsv", ".jsonl", ".json")  # of names of pictures
EVALUATION_FOLDERS = ("test", "validation", "val", "valid", "dev", "eval", "evaluation")


def read_pictures(config: ImageData, path: str | None, field: str, split: str) -> LabelledPictures:
    """Reads the pictures of the run file's source. split: "train" or "test", where the source holds both."""
    cache = config.cache or default_root()
    match config.source:
        case "digits":
            return _digits()
        case "folder":
            return class_folders(Path(path or "").expanduser(), field, split, cache)
        case "table":
            from drivetrain.data.table_listing import table_list

            given = table_list(config, path or "", field, image_suffixes(), cache)
            notes = () if given.warning is None else (given.warning,)
            files = file_pictures(given.files, given.names)
            return LabelledPictures(files, given.numbers, given.label_names, notes=notes)
        case "cifar10":
            return _cifar10(Path(path or "").expanduser(), field, split, cache)
        case "webdataset":
            return _in_tars(config, path or "", field, cache)
        case "parquet":
            from drivetrain.data.image_tables import parquet_images  # these few import pandas, which takes a while

            table = parquet_images(path or "", field, config, split)
        case "hub":
            from drivetrain.data.image_tables import hub_images

            table = hub_images(path or "", field, config, split)
    assert table.labels is not None
    pictures = EncodedPictures(table.open, table.names, table.key)
    return labelled(pictures, table.labels, table.classes, table.notes)


def pictures_to_predict(config: ImageData, path: str, field: str) -> Pictures:
    """Reads an image, a folder of images at any depth, a table of their names, parquet files or tar archives; labels
    are not needed."""
    given, cache = Path(path).expanduser(), config.cache or default_root()
    shards = is_pattern(path)
    if not given.exists() and not shards:
        raise problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
    if path.endswith(".parquet") or (given.is_dir() and any(given.glob("*.parquet"))):
        from drivetrain.data.image_tables import parquet_images

        table = parquet_images(path, field, config, "test", labelled=False)
        return EncodedPictures(table.open, table.names, table.key)
    if shards or ".tar" in given.suffixes or given.suffix == ".tgz" or (given.is_dir() and any(given.glob("*.tar"))):
        tars, _ = tar_pictures(path, field, image_suffixes(), None, cache)
        return EncodedPictures(tars.opener(), tars.names, tars.key)
    if ending(given) in TABLES:
        from drivetrain.data.table_listing import table_list

        named = table_list(config, str(given), field, image_suffixes(), cache, labelled=False)
        return file_pictures(named.files, named.names)
    if given.is_file():
        return file_pictures([str(given)], [path])

    def everything() -> Sequence[Path]:
        return [given]

    found, _ = listed(given, everything, image_suffixes(), cache, field)
    if not len(found.files):
        raise problem(field, f"{path} holds no images", f"images end in {', '.join(sorted(image_suffixes()))}")
    return file_pictures(found.files, found.names)


# --- sources ---------------------------------------------------------------------------------------------------------


def _digits() -> LabelledPictures:
    """Reads scikit-learn's 1,797 handwritten digits of 8 x 8, grey values 0 to 16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    names = [f"digit {i}" for i in range(len(images))]
    return labelled(ArrayPictures(images, names), digits.target.astype(str), tuple("0123456789"))


def _cifar10(root: Path, field: str, split: str, cache: Path) -> LabelledPictures:
    images, numbers, names, key, warning = stored_cifar10(root, field, split, cache)
    calls = [f"{split} {i}" for i in range(len(images))]
    notes = () if warning is None else (warning,)
    return LabelledPictures(ArrayPictures(images, calls, key), numbers, names, tuple(names), notes)


def _in_tars(config: ImageData, path: str, field: str, cache: Path) -> LabelledPictures:
    tars, warning = tar_pictures(path, field, image_suffixes(), config.label_column, cache)
    notes = [*tars.notes, *_left_out(tars, config, path, field), *([] if warning is None else [warning])]
    pictures = EncodedPictures(tars.opener(), tars.names, tars.key)
    return LabelledPictures(pictures, *tars.labels, notes=tuple(notes))


def _left_out(tars: TarPictures, config: ImageData, path: str, field: str) -> list[str]:
    """Returns a note of samples that cannot be used. Raises UserError if they are more than `bad_rows` allows."""
    bad = tars.bad
    rows = len(tars.store.array("shards")) + len(bad)
    if problems := too_many(path, bad, rows, most_dropped(config.bad_rows), field):
        raise UserError(problems)
    return [f"{len(bad):,} of {rows:,} samples of {path} are left out: {'; '.join(by_reason(bad))}"] if bad else []


def class_folders(root: Path, field: str, split: str, cache: Path | None = None) -> LabelledPictures:
    """Reads root/<class>/.../*.png, or root/<split>/<class>/.../*.png, in any format that PIL reads."""
    if not root.is_dir():
        raise problem(field, f"{root} is no folder", _other_source(root))
    root = _split_folder(root, split)

    def classes() -> Sequence[Path]:
        return sorted(path for path in root.iterdir() if path.is_dir() and not is_hidden(path.name))

    found, warning = listed(root, classes, image_suffixes(), cache or default_root(), field)
    if not len(found.files):
        loose = sum(path.is_file() and path.suffix.lower() in image_suffixes() for path in root.iterdir())
        why = f"{root} holds {loose} images but no class folders with images" if loose else f"{root} holds no images"
        tables = sorted(path.name for path in root.iterdir() if ending(path) in TABLES)
        fix = f", or give source: table and train: {root / tables[0]}" if tables else ""
        raise problem(field, why, f"lay it out as <class>/<image>.png{fix}")
    notes = _notes(root, found) + (() if warning is None else (warning,))
    return LabelledPictures(file_pictures(found.files, found.names), found.top_of, found.tops, notes=notes)


def _other_source(path: Path) -> str:
    """Returns what to do about a path that is no folder: the name of the source that reads such a file, if one does."""
    if path.is_file():
        if ending(path) in TABLES:
            return "give source: table, and image_folder where the pictures lie elsewhere"
        if ending(path) == ".parquet":
            return "give source: parquet"
        if ".tar" in path.suffixes or path.suffix == ".tgz":
            return "give source: webdataset"
        return "give a folder with a folder of pictures for each class"
    return f"paths are taken from the current folder, {Path.cwd()}"


def _split_folder(root: Path, split: str) -> Path:
    """Returns root/train or root/test where root holds splits; root itself where it holds classes."""
    if not (root / "train").is_dir():
        return root
    if split == "train":
        return root / "train"
    return next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), root)


def _notes(root: Path, found: Listing) -> tuple[str, ...]:
    """Returns notes of what was left out, with the place of the first of each kind."""
    notes = []
    if others := found.others:
        kinds = ", ".join(f"{count} {ending} ({first} first)" for ending, count, first in others)
        count = sum(count for _, count, _ in others)
        what = "is no image" if count == 1 else "are no images"
        notes.append(f"{counted(count, 'file')} in {root} left out, which {what}: {kinds}")
    if links := found.repeated:
        more = f" and {len(links) - 5} more" if len(links) > 5 else ""
        shown = ", ".join(f"{link} → {real}" for link, real in links[:5]) + more
        notes.append(f"links in {root} that lead to folders which are read anyway, or hold it, are left out: {shown}")
    return tuple(notes)
