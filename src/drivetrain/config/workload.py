"""The workloads: a model, its data and the task that joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from drivetrain.config.base import Frozen, PathOrId, doc
from drivetrain.config.language import BadRows, LanguageModel
from drivetrain.config.workload_block import WorkloadBlock


class ImageModel(Frozen):
    path: PathOrId | None = doc("Transformers image classifier to start from: a local folder or a hub id", None)
    trust_remote_code: bool = doc(
        "Run Python code that lies beside the model at path (docs/reference/security.md)", False
    )
    config: dict[str, Any] | None = doc(
        "Transformers config of a model made from scratch: model_type and its fields", None
    )
    norm: Literal["as_is", "group"] = doc(
        "group replaces BatchNorm by GroupNorm, so that results do not depend on how a batch is cut", "as_is"
    )


class ImageData(Frozen):
    source: Literal["digits", "folder", "table", "cifar10", "webdataset", "parquet", "hub"] = doc(
        "digits (bundled), folder of class folders, table of file names and labels (CSV, TSV, JSON Lines), CIFAR-10 "
        "python pickles, tar archives as WebDataset lays them out, parquet files, or a hub data set"
    )
    train: PathOrId | None = doc(
        "Training data: a folder, a file, shards such as train-{000..099}.tar, or a hub id (not for digits)", None
    )
    evaluation: PathOrId | None = doc("Evaluation data, same form; split off from train if left out", None)
    evaluation_fraction: float = doc("Stratified share split off when evaluation is not given", 0.1, gt=0, lt=1)
    image_column: str = doc("Column that holds the images (parquet, hub) or their file names (table)", "image")
    label_column: str = doc(
        "Column (table, parquet, hub) or key of a .json (webdataset) that holds the labels", "label"
    )
    image_folder: PathOrId | None = doc("Folder of the files that a table names; left out, the table's own", None)
    limit_train: int | None = doc("Use this many training samples, drawn in the classes' proportions", None, gt=0)
    limit_evaluation: int | None = doc("Use this many evaluation samples, in the classes' proportions", None, gt=0)
    image_size: int | None = doc("Resize images to this many pixels a side; left out, all must be one size", None, gt=0)
    crop_padding: int = doc("Training: pad by this many pixels, then crop back at a random place", 0, ge=0)
    flip: bool = doc("Training: mirror half of the images", False)
    mean: list[float] | None = doc("Mean a channel, 0 to 1; the model's own if it has one, else 0.5", None)
    std: list[float] | None = doc("Standard deviation a channel; the model's own if it has one, else 0.5", None)
    bad_rows: BadRows = doc(
        "Pictures that cannot be read: error stops at the first; drop lets up to 5 % count for nothing; a number, up "
        "to that share",
        "error",
    )
    cache: Path | None = doc("Folder for lists of files and decoded images; left out, the user's cache", None)


Weight = Annotated[float, Field(ge=0)]


class ClassLoss(Frozen):
    class_weights: Literal["balanced"] | dict[str | int, Weight] | list[Weight] | None = doc(
        "Weight of each class: {name: weight} (1 for the others), a list in the classes' order, or balanced, by which "
        "each class counts the same; scaled to a mean of 1 over the training samples",
        None,
    )
    label_smoothing: float = doc("Share of each target that is spread over all classes", 0.0, ge=0, lt=1)
    focal_gamma: float = doc("Focal loss: the higher, the less samples count that are right already", 0.0, ge=0)


class ImageClassification(WorkloadBlock):
    type: Literal["image_classification"] = doc("Task", "image_classification")
    model: ImageModel = doc("Model to train")
    data: ImageData = doc("Images and labels")
    loss: ClassLoss = doc("Cross-entropy, and what changes it", ClassLoss())
    channels_last: bool = doc("Keep images and weights channels-last, which convolutions usually prefer", True)


class TextModel(Frozen):
    path: PathOrId | None = doc("Transformers model to start from: a local folder or a hub id", None)
    trust_remote_code: bool = doc(
        "Run Python code that lies beside the model at path (docs/reference/security.md)", False
    )
    config: dict[str, Any] | None = doc(
        "Transformers config of a model made from scratch: model_type and its fields", None
    )
    tokenizer: PathOrId | None = doc(
        "Tokenizer: a folder, a WordPiece vocab.txt or a hub id; left out, model.path's", None
    )
    trust_tokenizer_code: bool = doc(
        "Run Python code that lies beside the tokenizer (docs/reference/security.md)", False
    )


class TextData(Frozen):
    train: PathOrId = doc("CSV, TSV, JSONL or parquet file, or a hub id; of a stream, a folder or a pattern too")
    evaluation: PathOrId | None = doc("Evaluation data, same form; split off from train if left out", None)
    evaluation_fraction: float = doc("Stratified share split off when evaluation is not given", 0.1, gt=0, lt=1)
    text_column: str | int = doc("Column of the text: its name, or its position from 0 if there is no header", "text")
    text_pair_column: str | int | None = doc("Column of a second text, for tasks over pairs", None)
    label_column: str | int = doc("Column of the label: its name, or its position from 0", "label")
    header: bool = doc("Whether the first row of a CSV or TSV file names the columns", True)
    subset: str | None = doc("Hub only: the subset (configuration) of the data set", None)
    max_length: int = doc("Tokens kept of one sample, special tokens included", 128, gt=2)
    padding: Literal["dynamic", "fixed"] = doc("Pad to the longest of the batch, or always to max_length", "dynamic")
    group_by_length: bool = doc("Cut batches into micro-batches of like length: less padding, same result", True)
    stream: bool = doc(
        "Read and tokenise training rows when they are needed: shards in a shuffled order, rows within stream_buffer",
        False,
    )
    stream_buffer: int = doc("Rows shuffled together in a stream", 10_000, gt=0)
    classes: list[str] | None = doc(
        "stream: the labels, in the classes' order; left out, those of the evaluation data", None
    )
    unpadded: bool | Literal["auto"] = doc(
        "Lay a micro-batch's texts end to end, without padding; auto: on CPUs, where the model gives the same so",
        "auto",
    )
    limit_train: int | None = doc("Use this many training samples, drawn in the classes' proportions", None, gt=0)
    limit_evaluation: int | None = doc("Use this many evaluation samples, in the classes' proportions", None, gt=0)
    bad_rows: BadRows = doc(
        "Rows without text: error refuses them; drop leaves out up to 5 % of a file; a number, up to that share", "drop"
    )
    cache: Path | None = doc("Folder for tokenised data; left out, drivetrain's folder in the user's cache", None)


class TextClassification(WorkloadBlock):
    type: Literal["text_classification"] = doc("Task", "text_classification")
    model: TextModel = doc("Model to train")
    data: TextData = doc("Texts and labels")
    loss: ClassLoss = doc("Cross-entropy, and what changes it", ClassLoss())

    @property
    def lengths_vary(self) -> bool:
        return True


class OwnCode(WorkloadBlock):
    """A workload whose model, data and loss are the user's own Python."""


class UserModule(OwnCode):
    type: Literal["module"] = doc("Task", "module")
    path: Path = doc("Python file that defines the model, the data and the loss")
    options: dict[str, Any] = doc("Keyword arguments for the file's functions", {})


class UserObjects(OwnCode):
    """Objects that the caller of drivetrain.train() passed: a run file alone cannot make them again."""

    type: Literal["objects"] = doc(
        "Task: drivetrain.train(model=...) writes it; no run file of your own has it", "objects"
    )


Workload = ImageClassification | TextClassification | LanguageModel | UserModule | UserObjects
