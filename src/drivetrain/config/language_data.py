"""The texts or conversations that a language model is trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from drivetrain.config.bad_rows import BadRows
from drivetrain.config.base import Frozen, MaybeEmpty, PathOrId, doc
from drivetrain.config.location import Location, Source

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
StagedWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Separated(Frozen):
    """Documents that a text separates."""

    separator: Annotated[str, Field(min_length=1)] = doc("The text between two documents, such as <|endoftext|>")


Documents = Literal["file", "line", "blank_line"] | Separated


class DataSource(Frozen):
    """One data set of a mixture."""

    path: PathOrId = doc("A file, a folder of files, a name in the registry, or a hub id")
    formatting: Literal["auto", "text", "alpaca", "sharegpt", "openai", "trl"] = doc(
        "Format of a row; auto looks at the first rows", "auto"
    )
    columns: dict[str, str] = doc("Names of columns as LLaMA-Factory gives them: {prompt: ..., response: ...}", {})
    tags: dict[str, str] = doc("Names inside a message as LLaMA-Factory gives them: {role_tag: ...}", {})
    subset: str | None = doc("Hub only: the subset (configuration)", None)
    split: str = doc("Hub only: the split", "train")
    folder: str | None = doc("Hub only: the folder inside the data set", None)
    samples: int | None = doc("Use this many rows, drawn at random; of a stream the first ones", None, gt=0)
    weight: Weight | dict[Annotated[int, Field(ge=0)], StagedWeight] | None = doc(
        "Share of the samples, relative to the other data sets'; left out, every row once. {0: 3, 1000: 1} changes it "
        "at these steps (a curriculum); 0 leaves the set out for a while",
        None,
    )
    max_passes: float | None = doc(
        "Go through the data set at most so often an epoch; the excess of its weight goes to the others", None, gt=0
    )
    replace: dict[str, MaybeEmpty] = doc("Texts put in the place of others, such as {'{{name}}': Ada}", {})


def _sources(given: Any) -> Any:
    """Returns a list for a path, a block, or a list of either."""
    listed = given if isinstance(given, list) else [given]
    return [{"path": each} if isinstance(each, str) else each for each in listed]


Sources = Annotated[list[DataSource], BeforeValidator(_sources), Field(min_length=1)]


class LanguageData(Frozen):
    train: Sources = doc("A file, folder, registered name or hub id; a block with more settings; or a list of them")
    evaluation: Sources | None = doc("Evaluation data, same form; held out of train if left out", None)
    evaluation_fraction: float = doc(
        "Share of train held out when evaluation is not given; 0 holds nothing out", 0.1, ge=0, lt=1
    )
    registry: Source | None = doc("LLaMA-Factory's dataset_info.json, or its folder: data sets by name", None)
    documents: Documents = doc(
        "pretrain: the documents of a text file: the whole file, each line, or the text between blank lines or, with "
        "{separator: ...}, between separators",
        "file",
    )
    length: int = doc("Tokens of a sample: of each window of text, at most of a conversation", 256, gt=1)
    template: PathOrId | None = doc(
        "Chat template: alpaca, chatml, plain, vicuna or a Jinja file; left out, the tokenizer's", None
    )
    system: MaybeEmpty | None = doc("sft: the system message of conversations that have none", None)
    pairs: Literal["best_and_worst", "all"] = doc(
        "Rows of several scored or ranked answers: best_and_worst makes one pair of each, all one of every two answers "
        "whose scores differ",
        "best_and_worst",
    )
    train_on: Literal["responses", "last_response", "all"] = doc("sft: the tokens that are targets", "responses")
    too_long: Literal["truncate", "drop", "error"] = doc("sft: what to do with a sample of more tokens", "truncate")
    bad_rows: BadRows = doc(
        "Rows that cannot be used: error refuses them all at once; drop leaves out up to 5 % of a data set; a number, "
        "up to that share",
        "error",
    )
    packing: bool = doc("sft: lay the samples of a micro-batch end to end, without padding; same result", True)
    fixed_rows: bool | Literal["auto"] = doc(
        "Packed rows: fill each up to one length, so that shapes never change; same result. auto: on a GPU, and where "
        "blocks are compiled",
        "auto",
    )
    group_by_length: bool = doc("sft without packing: cut batches into micro-batches of like length", True)
    mix: Literal["concat", "interleave_under", "interleave_over"] = doc(
        "An epoch of several data sets: concat, as many samples as there are; interleave_under, until the first set is "
        "through; interleave_over, until each set was gone through once (LLaMA-Factory's mix_strategy)",
        "concat",
    )
    stream: bool = doc(
        "Read and tokenise rows when they are needed: shards in a shuffled order, rows within stream_buffer", False
    )
    stream_buffer: int = doc("Rows shuffled together in a stream", 10_000, gt=0)
    evaluation_rows: int = doc(
        "stream: evaluate on the first so many rows of each data set, and train on the others", 0, ge=0
    )
    cache: Location | None = doc("Folder for tokenised data; left out, drivetrain's folder in the user's cache", None)
