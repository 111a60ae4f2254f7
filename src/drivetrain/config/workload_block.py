"""The base of all workloads' blocks: its methods answer for the workload, so that no other code asks for its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from drivetrain.config.base import Frozen, PathOrId, doc
from drivetrain.config.files import read_json
from drivetrain.config.generation_metrics import metric_problems
from drivetrain.config.machine import Machine
from drivetrain.config.model_files import context_of
from drivetrain.errors import Problem, UserError

if TYPE_CHECKING:
    from drivetrain.config.run import RunConfig


class ModelBlock(Frozen):
    """A Transformers model, from its weights or from scratch; the workloads' own blocks add to it."""

    path: PathOrId | None = doc("Transformers model to start from: a local folder or a hub id", None)
    trust_remote_code: bool = doc(
        "Run Python code that lies beside the model at path (docs/reference/security.md)", False
    )
    config: dict[str, Any] | None = doc(
        "Transformers config of a model made from scratch: model_type and its fields", None
    )

    def problems(self) -> Iterator[Problem]:
        """Yields what is missing, given twice or without effect."""
        if (self.path is None) == (self.config is None):
            given = "neither was given" if self.path is None else "both were given"
            yield Problem(
                "workload.model",
                f"of path and config {given}",
                "give path (a folder or hub id) to start from weights, or config to start from scratch",
            )
        elif self.config is not None and "model_type" not in self.config:
            yield Problem("workload.model.config", "names no model_type", "add e.g. model_type: resnet")
        for key, of in (("trust_remote_code", "path"), ("trust_tokenizer_code", "tokenizer")):
            if getattr(self, key, False) and getattr(self, of) is None:
                why = f"it allows code beside workload.model.{of}, and there is none"
                yield Problem(f"workload.model.{key}", why, "leave it out")


@dataclass(frozen=True)
class CodeFile:
    """The user's own Python file, and keyword arguments for its functions."""

    path: Path
    options: dict[str, Any]


class WorkloadBlock(Frozen):
    """The block `workload` of a run file: the model, its data and the task.

    A new kind overrides what differs for it and is listed in `drivetrain.config.workload`.
    """

    IMPLEMENTATION: ClassVar[str]  # the class in drivetrain.workloads, as module:class
    ACCOUNTS: ClassVar[str] = (
        ""  # reports the rows of data sets of which no sample is left: module:function(block, seed)
    )
    MADE_DATA: ClassVar[str] = ""  # writes data of a number and length: module:function(block, folder, samples, length)
    STREAMED: ClassVar[Sequence[str]] = ()  # the fields of data that data.stream is about
    AUTO_CLASS: ClassVar[str] = ""  # the Transformers class that builds its model; "" where the user's code does

    @property
    def implementation(self) -> str:
        return self.IMPLEMENTATION

    @property
    def auto_class(self) -> str:
        return self.AUTO_CLASS

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def described_model(self) -> ModelBlock | None:
        """The Transformers model that the run file describes; None where the user's own code makes the model."""
        return None

    @property
    def base(self) -> str | None:
        """The folder or hub id of the weights that training starts from; None where there are none."""
        return None if self.described_model is None else self.described_model.path

    @property
    def known_config(self) -> dict[str, Any]:
        """The model's Transformers config as far as it is known without the hub; otherwise empty.

        A folder that cannot be read is reported when the model is built.
        """
        model = self.described_model
        if model is None or model.path is None:
            return (None if model is None else model.config) or {}
        file = Path(model.path).expanduser() / "config.json"
        try:
            return read_json(file) if file.is_file() else {}
        except UserError:
            return {}

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """The scaling of rotary positions that is laid over the model's own config."""
        return None

    @property
    def is_causal(self) -> bool:
        """Whether each position of the model attends to earlier ones alone."""
        return "CausalLM" in self.auto_class

    @property
    def text_length(self) -> int | None:
        """The tokens to which a text is cut; None where texts are not cut to one length."""
        return None

    @property
    def has_classes(self) -> bool:
        """Whether the model has an output for each class, whose names are in its config."""
        return False

    @property
    def has_tokenizer(self) -> bool:
        """Whether checkpoints hold a tokenizer beside the model."""
        return False

    @property
    def template_owner(self) -> str | None:
        """The folder or hub id of the tokenizer whose chat template is taken; None where no template is needed, or the
        run file names one."""
        return None

    @property
    def code_file(self) -> CodeFile | None:
        """The user's own Python file that makes the model; None where there is no such file."""
        return None

    @property
    def named_functions(self) -> Sequence[tuple[str, str]]:
        """(field of the run file, import path) of functions of the user's own that the run calls."""
        return ()

    @property
    def packages(self) -> Sequence[tuple[str, str, str]]:
        """(field of the run file, feature, optional package that it needs)."""
        return ()

    @property
    def runs_answers(self) -> bool:
        """Whether code runs that the model writes."""
        return False

    @property
    def needs_objects(self) -> bool:
        """Whether the model and the data are objects of the calling program, which no run file makes again."""
        return False

    # --- the data -----------------------------------------------------------------------------------------------------

    @property
    def sources(self) -> Sequence[tuple[str, str]]:
        """(path, hub id or registered name; field of the run file) of the data, training data first."""
        return ()

    @property
    def streamed(self) -> Sequence[str]:
        """The fields of data that are read in a stream, also from a store."""
        return self.STREAMED if getattr(getattr(self, "data", None), "stream", False) else ()

    @property
    def answers_prompts(self) -> bool:
        """Whether the model answers prompts at each evaluation."""
        return False

    @property
    def has_evaluation_data(self) -> bool:
        """Whether the run file names data for the evaluation, rather than a share of the training data."""
        return any(field == "workload.data.evaluation" for _, field in self.sources)

    @property
    def registry(self) -> Path | None:
        """The dataset_info.json (or its folder) that registered names are looked up in."""
        return None

    @property
    def digested(self) -> Literal["rows", "tables"] | None:
        """How data files are read whose digests are kept beside what was read; None where none are kept."""
        return None

    @property
    def cache_folder(self) -> Path | None:
        """The folder for prepared data that the run file names."""
        return None

    @property
    def accepted_bad_rows(self) -> float | Literal["error", "drop"] | None:
        """The share of each data set's rows that may be left out; None where the report of its data does not count
        them."""
        return None

    @property
    def refuses_long_samples(self) -> bool:
        """Whether a sample that is too long is an error."""
        return False

    def lenient(self) -> Self:
        """Returns the same workload with rows that cannot be used left out, where it would refuse them."""
        return self

    def strict(self) -> Self:
        """Returns the same workload, refusing every row that cannot be used."""
        return self

    # --- its samples and its loss -------------------------------------------------------------------------------------

    @property
    def lengths_vary(self) -> bool:
        """Whether the lengths of batches vary, as those of texts do."""
        return False

    @property
    def is_packed(self) -> bool:
        """Whether several samples may share a row."""
        return False

    @property
    def fixed_rows(self) -> bool | Literal["auto"]:
        """Whether packed rows are filled up to one length."""
        return False

    @property
    def makes_samples(self) -> bool:
        """Whether the model makes the samples that it is trained on, several of each one in the data."""
        return False

    @property
    def samples_made(self) -> float:
        """The number of samples that one of the data gives a step: other than 1 where the model makes its samples."""
        return 1

    @property
    def may_fuse_loss(self) -> bool:
        """Whether head and loss may be computed in one operation."""
        return False

    # --- what it cannot do, and what a run file leaves to it ----------------------------------------------------------

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Yields what cannot work, whatever the machine."""
        asked, field = run.evaluation.generation, "evaluation.generation"
        yield from metric_problems(asked, field)
        if asked and not self.answers_prompts:
            why = f"{', '.join(asked)} would be of answers, and this run lets its model answer no prompts"
            yield Problem(field, why, "add workload.generate={} to a language model, or leave it out")
        if self.described_model is not None:
            yield from self.described_model.problems()

    def file_problems(self) -> Iterator[Problem]:
        """Yields what the model's small files show that cannot work, before the model is built."""
        yield from self.context_problems(context_of(self.known_config))

    def context_problems(self, places: int | None) -> Iterator[Problem]:
        """Yields samples' lengths that the model has no positions for. places: those that it has, if any bound is
        known."""
        del places
        yield from ()

    def adapter_problems(self) -> Iterator[Problem]:
        """Yields what cannot work under adapters."""
        if self.described_model is not None and self.described_model.config is not None:
            why = "a model made from a config starts at random: the adapter could not be loaded without it"
            fix = "train the model first, and give its checkpoint's folder as workload.model.path"
            yield Problem("adapter", why, fix)

    def path_problems(self) -> Iterator[Problem]:
        """Yields files that must be there and are not. A hub id looks like a relative path: only what cannot be one is
        refused."""
        return iter(())

    def resolved(self, run: RunConfig, machine: Machine) -> Self:
        """Returns the block with what it leaves to the engine and the machine filled in."""
        del run, machine
        return self

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yields (field, why) of settings that nothing reads in this workload, whatever their values."""
        if self.has_evaluation_data:
            yield "workload.data.evaluation_fraction", "evaluation data were given"

    def notices(self, run: RunConfig) -> Iterator[str]:
        """Yields remarks on what works but should be known before the run starts."""
        del run
        return iter(())

    def compile_doubts(self, run: RunConfig, machine: Machine, packs: bool) -> Iterator[str]:
        """Yields reasons why compiling may not pay. packs: whether samples do share rows."""
        del run, machine, packs
        if self.described_model is None or self.described_model.trust_remote_code:
            yield "whether a model's own code can be compiled is not known"
