"""Learning from a teacher's distributions over tokens, as data: the losses, and which settings go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from drivetrain.config.adapter import Adapter
from drivetrain.config.base import Frozen, doc
from drivetrain.config.generation import Generation
from drivetrain.config.reference import OtherModelBlock, as_block
from drivetrain.config.rollout_server import RolloutServer, as_server, server_problems
from drivetrain.errors import Problem

FIELD = "workload.distillation"
TEACHER = f"{FIELD}.teacher"
DISTILL = "distill"
SFT = "sft"  # the loss of the data's own tokens
JS = "js"

OF_OWN = ("max_new_tokens", "drawing_temperature", "server")
LossName = Literal["forward_kl", "reverse_kl", "js", "sft"]
USUAL: Mapping[str, float] = {JS: 1.0}


def _weighted(given: Any) -> Any:
    return {given: 1.0} if isinstance(given, str) else given


Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mixture = Annotated[dict[LossName, Weight], BeforeValidator(_weighted), Field(min_length=1)]


class Distillation(Frozen):
    teacher: Annotated[OtherModelBlock, BeforeValidator(as_block)] = doc(
        "The teacher: a path, or a block", OtherModelBlock()
    )
    loss: Mixture | None = doc(
        "The divergence from the teacher: forward_kl, reverse_kl, js (usual); or a mixture {js: 1, sft: 0.5} with the "
        "loss of the data's own tokens",
        None,
    )
    beta: float = doc("js: the teacher's share in what both are compared with", 0.5, gt=0, lt=1)
    temperature: float = doc("Temperature of both distributions", 1.0, gt=0)
    own_answers: float = doc(
        "Share of replies that the model writes itself, as it is at that step, in place of the data's (on-policy GKD)",
        0.0,
        ge=0,
        le=1,
    )
    max_new_tokens: int = doc("own_answers: tokens of a reply, at most; none goes beyond data.length", 128, gt=0)
    drawing_temperature: float = doc("own_answers: temperature at which replies are drawn", 1.0, gt=0)
    server: Annotated[RolloutServer | None, BeforeValidator(as_server)] = doc(
        "own_answers: a vLLM server that draws the replies, http://127.0.0.1:8000 or a block; left out, the run draws "
        "them itself",
        None,
    )

    @property
    def losses(self) -> Mapping[str, float]:
        """Returns name → weight."""
        return USUAL if self.loss is None else {str(name): weight for name, weight in self.loss.items()}

    @property
    def divergences(self) -> list[str]:
        return [name for name in self.losses if name != SFT]

    @property
    def drawing(self) -> Generation:
        """How the model's own replies are drawn."""
        return Generation(max_new_tokens=self.max_new_tokens, temperature=self.drawing_temperature)

    @property
    def given(self) -> list[str]:
        """Returns the settings that differ from their defaults."""
        fields = type(self).model_fields
        return [name for name in fields if getattr(self, name) != fields[name].default]


def distillation_problems(
    block: Distillation, stage: str, adapters: Sequence[Adapter] | None = None
) -> Iterator[Problem]:
    """Yields settings that do not go together, or that nothing reads."""
    if stage != DISTILL:
        for name in block.given:
            why = f"only stage {DISTILL} reads it, and workload.stage is {stage}"
            yield Problem(f"{FIELD}.{name}", why, f"leave it out, or give stage: {DISTILL}")
        return
    if block.teacher.path is None:
        yield Problem(f"{TEACHER}.path", "there is no teacher to learn from", "give the folder or hub id of a model")
    if not block.divergences:
        yield Problem(f"{FIELD}.loss", "sft reads no teacher", "add forward_kl, reverse_kl or js, or give stage: sft")
    if block.own_answers and SFT in block.losses:
        why = "sft learns the tokens of replies, and those that the model writes itself are its own"
        yield Problem(f"{FIELD}.loss", why, "leave sft or own_answers out")
    if block.server is not None and block.own_answers:
        yield from server_problems(block.server, f"{FIELD}.server", adapters)
    for name in OF_OWN:
        if name in block.given and not block.own_answers:
            yield Problem(
                f"{FIELD}.{name}", "the model writes no replies", "give own_answers, such as 0.5, or leave it out"
            )
    if "beta" in block.given and JS not in block.losses:
        yield Problem(f"{FIELD}.beta", f"{' and '.join(block.divergences)} has none", "leave it out, or give loss: js")
