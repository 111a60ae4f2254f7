"""Fits a recipe to a user's data: its text with other data, a model for them, and each decision as a comment."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
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
    is_chinese,
)

RECIPES: dict[type, str] = {
    LabelledTexts: "hotel-bert",
    Conversations: "alpaca-sft",
    Documents: "shakespeare-char",
    ClassFolders: "cifar10-small",
    PictureTable: "cifar10-small",
}
TYPES = {  # the workload of a recipe that data of this kind can be put into
    LabelledTexts: "text_classification",
    Conversations: "language_model",
    Documents: "language_model",
    ClassFolders: "image_classification",
    PictureTable: "image_classification",
}
MOST_EVALUATIONS = 20  # of a run that was made longer
LEAST_STEPS = 200  # of a run: a model that starts from scratch learns nothing in a few
STEPS_AN_EPOCH = 4  # at least: a batch of more than a quarter of the data would teach little
LENGTHS = (64, 128, 256)  # tokens of a text that a small BERT is given: attention takes the square of them
MOST_VOCABULARY = 21_000  # BERT's own for Chinese
HELD_OUT = {10: 0.1, 5: 0.2}  # at least so many rows → a share that holds out one of them, a bad one left out
FEW_ROWS = 20  # a recipe's 5 % of fewer may be none
SIZES = (32, 64, 96, 128, 224)  # pixels
MOST_DISTINCT = 8000  # characters that a model may have one by one


@dataclass
class Fitted:
    """A fitted recipe. decisions: one sentence each, for comments at the top of the file. beside: further files by
    their endings."""

    text: str
    decisions: list[str]
    beside: dict[str, str] = field(default_factory=dict)


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
    made = Fitted("", [])
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
    made.decisions += [
        f"Text: column {kind.text}; label: column {kind.label}, with {_listed(kind.classes)}; {counted(kind.rows, 'row')}"
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
    _batch(run, kind.rows * 0.9, made)


def _few_of_a_class(kind: LabelledTexts) -> list[str]:
    if kind.rows >= 10 * len(kind.classes):
        return []
    return [f"There are few rows for {len(kind.classes)} classes: metrics will vary much."]


def _conversations(run: Any, kind: Conversations, made: Fitted, stem: str) -> None:
    del stem
    chinese, characters = is_chinese(kind.sample), sum(map(len, kind.sample))
    data, model = run["workload"]["data"], run["workload"]["model"]
    source: Any = {"path": kind.path, "formatting": kind.formatting}
    if kind.columns:
        source["columns"] = dict(kind.columns)
    data.pop("registry", None)
    data["train"] = [source]
    own_model = "path" in model
    if not own_model:
        size = 8000 if characters > 200_000 else 2000 if characters > 30_000 else 400
        model["vocabulary_size"] = size
        model.yaml_set_comment_before_after_key(
            "tokenizer",
            before="from scratch, to see it work; to fine-tune a model of your own give path: FOLDER in place of all "
            "this, leave template out, and lower the learning rate (lr: 1.0e-5)",
            indent=4,
        )
        made.decisions.append(f"A small Llama from scratch, with a tokenizer of {size:,} tokens made of these texts.")
    data["bad_rows"] = "drop"
    made.decisions += [
        f"{counted(kind.rows, 'row')} in the format of {kind.formatting}{' (Chinese)' if chinese else ''}; "
        "replies are trained, the rest is only read.",
        *(
            [f"Columns: {', '.join(f'{own} is {found}' for own, found in kind.columns.items())}."]
            if kind.columns
            else []
        ),
        "Rows that cannot be used are left out, up to 5 % of them, and counted (bad_rows).",
    ]
    _hold_out(run, kind.rows, made)
    _batch(run, kind.rows * (1 - data["evaluation_fraction"]), made)


def _hold_out(run: Any, rows: int, made: Fitted) -> None:
    """Changes the share that is held out where it is none of so few rows; of fewer than five all are trained."""
    data = run["workload"]["data"]
    data.setdefault("evaluation_fraction", 0.1)
    if rows < min(HELD_OUT):
        data["evaluation_fraction"] = 0
        run["workload"].pop("generate", None)
        run.get("evaluation", {}).pop("metric", None)
        made.decisions.append("There are too few rows to hold any out: there is no evaluation, and no best checkpoint.")
    elif rows < FEW_ROWS:
        share = next(share for least, share in HELD_OUT.items() if rows >= least)
        data["evaluation_fraction"] = max(share, data["evaluation_fraction"])
        made.decisions.append(f"{data['evaluation_fraction']:.0%} of the rows are held out for evaluation.")


def _documents(run: Any, kind: Documents, made: Fitted, stem: str) -> None:
    del stem
    data, model = run["workload"]["data"], run["workload"]["model"]
    distinct = len(set(kind.sample))
    data["train"] = kind.path
    if model.get("tokenizer") == "characters" and distinct > MOST_DISTINCT:
        model["tokenizer"], model["vocabulary_size"] = "bpe", 8000
    chinese = is_chinese([kind.sample])
    made.decisions += [
        f"{counted(kind.characters, 'character')}{' (Chinese)' if chinese else ''}; a token is "
        f"{'a character' if model.get('tokenizer') == 'characters' else 'a piece of a word'}.",
        "To go on with a model of your own, give path: FOLDER in place of tokenizer and config.",
    ]
    windows = kind.characters * 0.9 / int(data.get("length", 256))
    if windows < 10:
        why = f"{kind.path} has {counted(kind.characters, 'character')}: too few to learn a language from"
        raise problem("--data", why, "give a longer text")
    _batch(run, windows, made)


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
    made.decisions.append(f"{counted(kind.pictures, 'picture')} of {_listed(kind.classes)}; {held_out}.")
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
    made.decisions.append(f"{counted(kind.pictures, 'picture')} of {_listed(kind.classes)}; {columns}; a tenth is held out.")
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
    _batch(run, samples, made)


# --- all -------------------------------------------------------------------------------------------------------------


def _batch(run: Any, samples: float, made: Fitted) -> None:
    """Sets a batch size that gives at least some batches an epoch, and epochs that give at least LEAST_STEPS steps."""
    most = max(1, int(samples) // STEPS_AN_EPOCH)
    batch = int(run.get("batch_size", 32))
    if batch > most:
        run["batch_size"] = most
        made.decisions.append(f"There are few samples: a batch has {most} in place of the recipe's {batch}.")
    loop, an_epoch = run["loop"], max(1, -(-int(samples) // min(batch, most)))
    if "epochs" in loop and loop["epochs"] * an_epoch < LEAST_STEPS:
        given, loop["epochs"] = loop["epochs"], -(-LEAST_STEPS // an_epoch)
        if loop["epochs"] > MOST_EVALUATIONS:
            run["evaluation"] = {"every_epochs": -(-loop["epochs"] // MOST_EVALUATIONS)}
        made.decisions.append(
            f"An epoch has {counted(an_epoch, 'step')}: {counted(loop['epochs'], 'epoch')} in place of the recipe's {given} "
            f"make {counted(loop['epochs'] * an_epoch, 'step')}, which a model from scratch needs to learn anything."
        )


def _listed(classes: tuple[str, ...]) -> str:
    shown = ", ".join(classes[:6])
    return f"{len(classes)} class{'' if len(classes) == 1 else 'es'} ({shown}{', ...' if len(classes) > 6 else ''})"


_FIT: dict[type, Callable[[Any, Any, Fitted, str], None]] = {
    LabelledTexts: _labelled_texts,
    Conversations: _conversations,
    Documents: _documents,
    ClassFolders: _class_folders,
    PictureTable: _picture_table,
}
