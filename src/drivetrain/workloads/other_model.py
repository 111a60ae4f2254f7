"""A model of another folder beside the trained one, which reads the same batches: a teacher, or a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from drivetrain.config.language import LanguageModel
from drivetrain.config.language_model import LanguageModelModel
from drivetrain.config.reference import OtherModelBlock
from drivetrain.data.row_shape import Rows
from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import problem
from drivetrain.models.language_head import TargetHead
from drivetrain.workloads.language_build import Inputs, build_language_model, inputs_of
from drivetrain.workloads.language_data import LanguageReader
from drivetrain.workloads.loss_contract import Auxiliary


class OtherModel:
    """head, inputs: those of the model that was built last."""

    head: TargetHead
    inputs: Inputs

    def __init__(self, block: OtherModelBlock, field: str, config: LanguageModel, reader: LanguageReader) -> None:
        """field: of the block in the run file. Raises UserError if its tokenizer has other tokens than the trained
        model's: its distributions would be over these."""
        assert block.path is not None
        path = self.path = block.path
        self.precision, self._field, self._config, self._reader = block.precision, field, config, reader
        theirs, own = load_tokenizer(path, f"{field}.path").get_vocab(), reader.tokenizer.get_vocab()
        if theirs == own:
            return
        differ = sorted({*(theirs.items() ^ own.items())}, key=lambda pair: (pair[1], pair[0]))
        some = ", ".join(dict.fromkeys(repr(token) for token, _ in differ[:3]))
        why = f"{path} has other tokens ({len(theirs):,}) than the model ({len(own):,}): {some}, ..."
        raise problem(
            f"{field}.path", why, "give a model with the same tokenizer, or workload.model.tokenizer: its own"
        )

    def beside(self, build: Callable[[], nn.Module]) -> Auxiliary:
        """Returns it as a model beside the trained one. build: calls `build` once that one is built."""
        return Auxiliary("frozen", build, self.path, precision=self.precision)

    def build(self, packs: bool, rows: Callable[[], Rows | None]) -> nn.Module:
        """Builds it in fp32, on the CPU. packs: whether samples of a batch lie end to end; rows: as in `Workload`.

        Raises UserError if it cannot take such batches.
        """
        name = self._field.rpartition(".")[2]
        options = LanguageModelModel(path=self.path, attention=self._config.model.attention, fused_loss=False)
        config = self._config.model_copy(update={"model": options})
        built = build_language_model(config, self._reader, packs, field=self._field)
        for note in built.notes:
            self._reader.warn(f"{name}: {note}")
        if packs and built.packed is None:
            why = f"{type(built.model).__name__} cannot take samples end to end in a row, as the model does"
            raise problem(f"{self._field}.path", why, "give workload.data.packing: false")
        if built.packed is not None:
            built.packed.rows = rows
        self.head, self.inputs = built.head, inputs_of(built)
        return built.model

    def logits_at_targets(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Returns (N, vocabulary) of the wrapped model."""
        return self.head.logits_at_targets(model, self.inputs.of(batch), batch["targets"])
