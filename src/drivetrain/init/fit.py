"""Fits a recipe to a user's data: its text with other data, a model for them, and each decision as a comment."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from drivetrain.errors import counted, problem
from drivetrain.init.catalogue import recipe
from drivetrain.init.data_kinds import (
    ClassFolders,
    Conversations,
    Documents,
    Kind,
    LabelledTexts,
    PictureTable,
    PreferenceRows,
    is_chinese,
)
from drivetrain.init.fit_language import conversations, documents, preferences
from drivetrain.init.fitted import Fitted, fit_batch, fit_precision, listed

RECIPES: dict[type, str] = {
    LabelledTexts: "hotel-bert",
    Conversations: "alpaca-sft",
    PreferenceRows: "alpaca-sft",
    Documents: "shakespeare-char",
    ClassFolders: "cifar10-small",
    PictureTable: "cifar10-small",
}
TYPES = {  # the workload of a recipe that data of this kind can be put into
    LabelledTexts: "text_classification",
    Conversations: "language_model",
    PreferenceRows: "language_model",
    Documents: "language_model",
    ClassFolders: "image_classification",
    PictureTable: "image_classification",
}
LENGTHS = (64, 128, 256)  # tokens of a text that a small BERT is given: attention takes the square of them
MOST_VOCABULARY = 21_000  # BERT's own for Chinese
SIZES = (32, 64, 96, 128, 224)  # pixels
CLASSIFIERS_QUICKER_ON = ("cuda",)  # in 16 bits: on a CPU such small models gain nothing


def fitted(kind: Kind, name: str | None, stem: str) -> Fitted:
    """Returns a run file for the data. name: a recipe, or None for the usual one. stem: the run file's name without
    ending.

    Raises UserError for a recipe for another kind of data.
    """
    file = recipe(name or RECIPES[type(kind)])
    yaml = YAML(typ="rt")
    yaml.width, yaml.preserve_quotes = 120, True
    run = yaml.load(file.read_text(encoding="utf-8"))
    workload = run["workload"]
    if workload["type"] != TYPES[type(kind)]:
        why = f"{file.stem} is a recipe of {workload['type']}, and {kind_name(kind)} were given"
        raise problem("RECIPE", why, f"take {RECIPES[type(kind)]}, or leave it out")
    made = Fitted("", [], is_chosen=name is not None)
    _FIT[type(kind)](run, kind, made, stem)
    _head(run, [f"{kind_name(kind)} of {Path(_path(kind)).name}, after the recipe {file.stem}.", *made.decisions])
    stream = io.StringIO()
    yaml.dump(run, stream)
    made.text = stream.getvalue()
    return made


def kind_name(kind: Kind) -> str:
    names: dict[type, str] = {
        LabelledTexts: "Labelled texts",
        Conversations: "Conversations",
        PreferenceRows: "Preferences",
        Documents: "Plain texts",
        ClassFolders: "Pictures in a folder a class",
        PictureTable: "Pictures with a table of labels",
    }
    return names[type(kind)]


def _path(kind: Kind) -> str:
    return kind.train if isinstance(kind, ClassFolders) else kind.path


def _head(run: Any, lines: list[str]) -> None:
    """Puts comments in place of those that the recipe begins with."""
    run.ca.comment = None
    run.yaml_set_start_comment("\n".join(lines))


# --- texts -----------------------------------------------------------------------------------------------------------


def _labelled_texts(run: Any, kind: LabelledTexts, made: Fitted, stem: str) -> None:
    from drivetrain.data.word_pieces import vocabulary

    chinese = is_chinese(kind.sample)
    words = vocabulary(kind.sample, MOST_VOCABULARY if chinese else 8000)
    made.beside["-vocab.txt"] = "\n".join(words) + "\n"
    lengths = sorted(len(text) if chinese else len(text.split()) * 4 // 3 for text in kind.sample)
    typical = lengths[int(len(lengths) * 0.9)] + 2
    length = next((each for each in LENGTHS if each >= typical), LENGTHS[-1])
    whole = sum(each + 2 <= length for each in lengths) / len(lengths)
    model, data = run["workload"]["model"], run["workload"]["data"]
    model["tokenizer"] = f"{stem}-vocab.txt"
    better = "bert-base-chinese" if chinese else "distilbert-base-uncased"
    model.yaml_set_comment_before_after_key(
        "tokenizer", before=f"from scratch; better, where the hub can be reached: path: {better} alone", indent=4
    )
    data["train"], data["text_column"], data["label_column"] = kind.path, kind.text, kind.label
    if not kind.header:
        data["header"] = False
    data["max_length"] = length
    run["precision"] = "fp32"
    balanced = _few_of_a_class(kind)
    columns = f"Text: column {kind.text}; label: column {kind.label}, with {listed(kind.classes)}"
    made.decisions += [
        f"{columns}; {counted(kind.rows, 'row')}"
        + (
            f", of which {kind.unusable}: these are left out while they are at most 5 % of all (bad_rows)."
            if kind.unusable
            else "."
        ),
        f"{'Chinese: a token is a character' if chinese else 'A token is a word or a piece of one'}, from "
        f"{stem}-vocab.txt, which was made of these texts ({len(words):,} tokens).",
        f"Texts are cut after {length} tokens (max_length): about {whole:.0%} of them have no more.",
        *([f"Columns that are not read: {', '.join(kind.others)}."] if kind.others else []),
        *balanced,
    ]
    fit_precision(run, made, CLASSIFIERS_QUICKER_ON)
    fit_batch(run, kind.rows * 0.9, made)


def _few_of_a_class(kind: LabelledTexts) -> list[str]:
    if kind.rows >= 10 * len(kind.classes):
        return []
    return [f"There are few rows for {len(kind.classes)} classes: metrics will vary much."]


# --- pictures --------------------------------------------------------------------------------------------------------


def _class_folders(run: Any, kind: ClassFolders, made: Fitted, stem: str) -> None:
    del stem
    data = run["workload"]["data"]
    data["source"], data["train"] = "folder", kind.train
    if kind.evaluation is None:
        data.pop("evaluation", None)
        data["evaluation_fraction"] = 0.1
    else:
        data["evaluation"] = kind.evaluation
    held_out = f"evaluated on {kind.evaluation}" if kind.evaluation else "a tenth is held out for evaluation"
    made.decisions.append(f"{counted(kind.pictures, 'picture')} of {listed(kind.classes)}; {held_out}.")
    _pictures(run, kind.sides, kind.pictures * (1.0 if kind.evaluation else 0.9), made)


def _picture_table(run: Any, kind: PictureTable, made: Fitted, stem: str) -> None:
    del stem
    data = run["workload"]["data"]
    data["source"], data["train"] = kind.source, kind.path
    data["image_column"], data["label_column"] = kind.image, kind.label
    if kind.folder is not None:
        data["image_folder"] = kind.folder
    data.pop("evaluation", None)
    data["evaluation_fraction"] = 0.1
    columns = f"picture: column {kind.image}; label: column {kind.label}"
    made.decisions.append(
        f"{counted(kind.pictures, 'picture')} of {listed(kind.classes)}; {columns}; a tenth is held out."
    )
    _pictures(run, kind.sides, kind.pictures * 0.9, made)


def _pictures(run: Any, sides: Any, samples: float, made: Fitted) -> None:
    data = run["workload"]["data"]
    for key in ("limit_train", "limit_evaluation"):
        data.pop(key, None)
    different = len(set(sides)) > 1
    shorter = statistics.median(min(side) for side in sides) if sides else SIZES[1]
    if different or not sides or shorter > SIZES[-1]:
        size = max((each for each in SIZES if each <= shorter), default=SIZES[0])
        data["image_size"] = size
        seen = "of different sizes" if different else f"larger than {SIZES[-1]} pixels" if sides else "of unknown size"
        made.decisions.append(f"They are {seen}, and made {size} x {size} pixels (image_size).")
    else:
        data.pop("image_size", None)
        made.decisions.append(f"All have {sides[0][0]} x {sides[0][1]} pixels, and stay as they are.")
    if "flip" in data:
        data.yaml_add_eol_comment("take it out where left and right differ: letters, digits, arrows", "flip")
    if not made.is_chosen:  # the usual recipe's precision is fp32
        fit_precision(run, made, CLASSIFIERS_QUICKER_ON)
    fit_batch(run, samples, made)


_FIT: dict[type, Callable[[Any, Any, Fitted, str], None]] = {
    LabelledTexts: _labelled_texts,
    Conversations: conversations,
    PreferenceRows: preferences,
    Documents: documents,
    ClassFolders: _class_folders,
    PictureTable: _picture_table,
}
