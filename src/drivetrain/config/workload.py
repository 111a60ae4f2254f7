"""The workloads: a model, its data and the task that joins them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from drivetrain.config.bad_rows import BadRows
from drivetrain.config.base import Frozen, PathOrId, doc
from drivetrain.config.data_paths import missing, missing_data
from drivetrain.config.language import LanguageModel
from drivetrain.config.location import Location
from drivetrain.config.machine import Machine
from drivetrain.config.model_files import beyond_context
from drivetrain.config.workload_block import CodeFile, ModelBlock, WorkloadBlock
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.run import RunConfig


class ImageModel(ModelBlock):
    path: PathOrId | None = doc("Transformers image classifier to start from: a local folder or a hub id", None)
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
        "Pictures that cannot be read: error stops at the first; drop ignores up to 5 %; a number, up to that share",
        "error",
    )
    cache: Location | None = doc("Folder for lists of files and decoded images; left out, the user's cache", None)


Weight = Annotated[float, Field(ge=0)]


class ClassLoss(Frozen):
    class_weights: Literal["balanced"] | dict[str | int, Weight] | list[Weight] | None = doc(
        "Weight of each class: {name: weight} (1 for the others), a list in the classes' order, or balanced, by which "
        "each class counts the same; scaled to a mean of 1 over the training samples",
        None,
    )
    label_smoothing: float = doc("Share of each target that is spread over all classes", 0.0, ge=0, lt=1)
    focal_gamma: float = doc(
        "Focal loss: the higher, the less a sample counts that is classified well already", 0.0, ge=0
    )

    def problems(self) -> Iterator[Problem]:
        """Yields settings that exclude one another."""
        if self.focal_gamma and self.label_smoothing:
            why = "focal loss asks how likely the one right class is, which smoothed targets do not have"
            yield Problem("workload.loss", why, "give focal_gamma or label_smoothing")
        given = self.class_weights
        if given is not None and given != "balanced" and not any(given.values() if isinstance(given, dict) else given):
            fix = "give weights above 0, or leave it out"
            yield Problem("workload.loss.class_weights", "no class weighs anything", fix)


class ImageClassification(WorkloadBlock):
    IMPLEMENTATION: ClassVar[str] = "drivetrain.workloads.image_classification:ImageClassificationWorkload"
    AUTO_CLASS: ClassVar[str] = "AutoModelForImageClassification"
    type: Literal["image_classification"] = doc("Task", "image_classification")
    model: ImageModel = doc("Model to train")
    data: ImageData = doc("Images and labels")
    loss: ClassLoss = doc("Cross-entropy, and what changes it", ClassLoss())
    channels_last: bool = doc("Keep images and weights channels-last, which convolutions usually prefer", True)

    @property
    def described_model(self) -> ImageModel:
        return self.model

    @property
    def has_classes(self) -> bool:
        return True

    @property
    def sources(self) -> Sequence[tuple[str, str]]:
        return _sources(self.data)

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from super().problems(run)
        yield from self.loss.problems()

    def path_problems(self) -> Iterator[Problem]:
        data = self.data
        if data.source == "digits":
            for name, path in (("train", data.train), ("evaluation", data.evaluation)):
                if path is not None:
                    yield Problem(f"workload.data.{name}", "digits are bundled and take no path", "leave it out")
            return
        if data.train is None:
            why = f"is required for source {data.source}"
            yield Problem("workload.data.train", why, "give a folder, file or hub id")
        if data.source != "hub":
            # reading shards names those that a pattern of theirs lacks
            marks = "{*?[" if data.source in {"webdataset", "parquet"} else ""
            yield from missing_data(data.train, data.evaluation, marks)


class TextModel(ModelBlock):
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
        "Rows without text or label: error refuses them; drop leaves out up to 5 % of a file; a number, up to that "
        "share",
        "drop",
    )
    cache: Location | None = doc("Folder for tokenised data; left out, drivetrain's folder in the user's cache", None)


class TextClassification(WorkloadBlock):
    IMPLEMENTATION: ClassVar[str] = "drivetrain.workloads.text_classification:TextClassificationWorkload"
    AUTO_CLASS: ClassVar[str] = "AutoModelForSequenceClassification"
    MADE_DATA: ClassVar[str] = "drivetrain.workloads.made_data:texts"
    STREAMED: ClassVar[Sequence[str]] = ("workload.data.train",)
    type: Literal["text_classification"] = doc("Task", "text_classification")
    model: TextModel = doc("Model to train")
    data: TextData = doc("Texts and labels")
    loss: ClassLoss = doc("Cross-entropy, and what changes it", ClassLoss())

    @property
    def described_model(self) -> TextModel:
        return self.model

    @property
    def text_length(self) -> int:
        return self.data.max_length

    @property
    def has_classes(self) -> bool:
        return True

    @property
    def has_tokenizer(self) -> bool:
        return True

    @property
    def sources(self) -> Sequence[tuple[str, str]]:
        return _sources(self.data)

    @property
    def digested(self) -> Literal["tables"]:
        return "tables"

    @property
    def cache_folder(self) -> Path | None:
        return self.data.cache

    @property
    def lengths_vary(self) -> bool:
        return True

    def context_problems(self, places: int | None) -> Iterator[Problem]:
        scratch = self.model.config is not None
        fix = "shorten it" + (", or raise workload.model.config.max_position_embeddings" if scratch else "")
        yield from beyond_context(places, self.data.max_length, "workload.data.max_length", fix)

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from super().problems(run)
        if self.model.path is None and self.model.tokenizer is None:
            yield Problem(
                "workload.model.tokenizer",
                "is required when the model is made from a config",
                "give a tokenizer folder, a vocab.txt or a hub id",
            )
        yield from self.loss.problems()
        why = self._why_padded(run)
        if self.data.unpadded is True and why is not None:
            yield Problem("workload.data.unpadded", f"true was given, but {why}", "leave it out")
        if self.data.classes is not None and not self.data.stream:
            why = "the classes are the labels of the training data, unless these are a stream"
            yield Problem("workload.data.classes", why, "leave it out, or give stream: true")

    def path_problems(self) -> Iterator[Problem]:
        return missing_data(self.data.train, self.data.evaluation)

    def resolved(self, run: RunConfig, machine: Machine) -> Self:
        if self.data.unpadded == "auto" and (machine.device != "cpu" or self._why_padded(run) is not None):
            return self.model_copy(update={"data": self.data.model_copy(update={"unpadded": False})})
        return self

    def compile_doubts(self, run: RunConfig, machine: Machine, packs: bool) -> Iterator[str]:
        yield from super().compile_doubts(run, machine, packs)
        if self.data.unpadded is True:
            yield "texts end to end have another number of tokens in each step"

    def _why_padded(self, run: RunConfig) -> str | None:
        """Returns why texts cannot be laid end to end, as far as the run file tells; None where nothing speaks
        against it."""
        if self.data.padding == "fixed":
            return "padding is fixed"
        if not run.engine.takes_encoder_rows or run.engine.needs_rows(run.devices):
            return f"engine={run.engine.label} takes rows of one text each"
        return "compile=true would compile the model for each number of tokens" if run.compile is True else None


class UserModule(WorkloadBlock):
    """A workload whose model, data and loss are the user's own Python file."""

    IMPLEMENTATION: ClassVar[str] = "drivetrain.workloads.user_module:UserModuleWorkload"
    type: Literal["module"] = doc("Task", "module")
    path: Location = doc("Python file that defines the model, the data and the loss")
    options: dict[str, Any] = doc("Keyword arguments for the file's functions", {})

    @property
    def code_file(self) -> CodeFile:
        return CodeFile(self.path, self.options)

    def path_problems(self) -> Iterator[Problem]:
        yield from missing("workload.path", self.path)
        if self.path.exists() and not self.path.is_file():
            yield Problem("workload.path", f"{self.path} is a folder, a pipe or a device", "give a Python file")


class UserObjects(WorkloadBlock):
    """Objects that the caller of drivetrain.train() passed: a run file alone cannot make them again."""

    IMPLEMENTATION: ClassVar[str] = "drivetrain.workloads.user_objects:UserObjectsWorkload"
    type: Literal["objects"] = doc(
        "Task: drivetrain.train(model=...) writes it; no run file of your own has it", "objects"
    )

    @property
    def needs_objects(self) -> bool:
        return True


def _sources(data: ImageData | TextData) -> list[tuple[str, str]]:
    given = (("train", data.train), ("evaluation", data.evaluation))
    return [(path, f"workload.data.{name}") for name, path in given if path is not None]


Workload = ImageClassification | TextClassification | LanguageModel | UserModule | UserObjects
KINDS: tuple[type[WorkloadBlock], ...] = (
    ImageClassification,
    TextClassification,
    LanguageModel,
    UserModule,
    UserObjects,
)
