"""Defines what the loss contract's parity tests run: a small decoder under losses of several terms, with a teacher
beside it or a statistic of the whole global batch, and the same steps by hand in one process, whole batches at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from drivetrain.config.adapter import Adapter
from drivetrain.config.training import Loader
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.models.adapters import AdapterSet
from drivetrain.workloads.base import Batch
from drivetrain.workloads.loss_contract import Auxiliary, LossContext, Partial
from tests.parity.cases import Curve
from tests.parity.mesh_cases import (
    ADAPTERS,
    IGNORED,
    LLAMA,
    OPTIMIZERS,
    QUANTISED,
    WIDE,
    MeshCase,
    Seeded,
    chats,
    engine_of,
    round_weights,
)

STEPS, BATCH = 5, 10
BETA = 2.0


@dataclasses.dataclass(frozen=True)
class LossCase(MeshCase):
    """model: sft-padded, or with an adapter and a quantised base as in the adapters' tests."""

    loss: str = "mixture"
    micro: int = 2  # samples of a micro-batch: 5 samples a rank are cut into 2, 2 and 1

    @property
    def name(self) -> str:
        return f"{self.loss}-{super().name}"

    @property
    def clip(self) -> float:
        """Small enough to clip."""
        return {"distil": 0.002, "mixture": 0.5}.get(self.loss, 0.1)


# --- the losses, as functions of logits: the workloads and plain PyTorch compute them alike ---------------------------


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T, V), (B, T) → (B,): of each sample's targets together."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(targets.shape).sum(1)


def divergence(logits: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Forward KL to the teacher at each target, summed."""
    at = targets != IGNORED
    own, other = logits.float()[at].log_softmax(-1), teacher.float()[at].log_softmax(-1)
    return (other.exp() * (other - own)).sum()


def kto(rewards: Tensor, tokens: Tensor, baseline: Tensor) -> Tensor:
    """(B,): Ethayarajh et al. 2024, equation 8; samples of an even number of tokens are the desirable ones, and the
    baseline has no gradient."""
    return 1 - torch.sigmoid(BETA * (rewards - baseline) * (1 - 2 * (tokens % 2)))


def sorted_pairs(rewards: Tensor) -> Tensor:
    """(N,) in the order of the batch, chosen and rejected in turns → scalar: Melnyk et al. 2024, the sorted rewards of
    each side compared in their order, summed over the pairs."""
    chosen, rejected = rewards[0::2].sort().values, rewards[1::2].sort().values
    return -F.logsigmoid(BETA * (chosen - rejected)).sum()


# --- the workloads ----------------------------------------------------------------------------------------------------


class Chats(Seeded):
    """Conversations, padded; the logits of all positions."""

    def logits(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        logits: Tensor = model(**self._given(batch)).logits
        return logits

    def rewards(self, model: Callable[..., Any], batch: Batch, context: LossContext) -> Tensor:
        """(B,), each per token, against the reference."""
        with torch.no_grad():
            reference = log_probabilities(self.logits(context.auxiliary["reference"], batch), batch["targets"])
        own = log_probabilities(self.logits(model, batch), batch["targets"])
        return (own - reference) / (batch["targets"] != IGNORED).sum(1).clamp(min=1)


class Distilled(Chats):
    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return {"teacher": Auxiliary(build=teacher, source="seed 17")}

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        given = self.logits(context.auxiliary["teacher"], batch)
        return {"loss": divergence(self.logits(model, batch), given, batch["targets"])}


class Mixture(Chats):
    """A term that is divided by samples beside one that is divided by tokens."""

    @property
    def terms(self) -> Mapping[str, float]:
        return {"preference": 1.0, "sft": 0.5}

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return {"preference": len(batch["targets"]), "sft": super().count(batch)}

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        del context
        found = log_probabilities(self.logits(model, batch), batch["targets"])
        return {"preference": -F.logsigmoid(found / 20).sum(), "sft": -found.sum()}


class Whole(Chats):
    """A loss that is a mean over samples and looks at the whole global batch."""

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return {"reference": Auxiliary(build=teacher, source="seed 17")}

    @property
    def has_statistics(self) -> bool:
        return True

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return {"loss": len(batch["targets"])}


class Kto(Whole):
    def statistics(self, model: nn.Module, batch: Batch, context: LossContext) -> Partial:
        rewards = self.rewards(model, batch, context)
        return Partial(sums={"reward": rewards.sum(), "samples": torch.tensor(float(len(rewards)))})

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        sums = context.statistics.sums
        tokens = (batch["targets"] != IGNORED).sum(1)
        return {"loss": kto(self.rewards(model, batch, context), tokens, sums["reward"] / sums["samples"]).sum()}


class Sorted(Whole):
    def statistics(self, model: nn.Module, batch: Batch, context: LossContext) -> Partial:
        return Partial(rows={"reward": self.rewards(model, batch, context)})

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        """Of the whole batch's loss the gradient that goes through this micro-batch's samples, and their share of its
        value: each pair is half of the one's and half of the other's."""
        rows, own = context.statistics.rows["reward"], context.statistics.own
        assert own is not None
        rewards = rows.index_copy(0, own, self.rewards(model, batch, context))
        loss = sorted_pairs(rewards)
        value = sorted_pairs(rows) * len(own) / len(rows)
        return {"loss": loss - loss.detach() + value}


KINDS: dict[str, type[Chats]] = {"distil": Distilled, "mixture": Mixture, "kto": Kto, "sorted": Sorted}


def teacher() -> nn.Module:
    torch.manual_seed(17)
    values = {**LLAMA, "vocab_size": 260}
    made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    return made


def workload(case: LossCase) -> Chats:
    made = chats(False, False, WIDE if "wide" in case.model else {})
    made.__class__ = KINDS[case.loss]
    assert isinstance(made, Chats)
    if case.adapter is not None:
        made.adapters = AdapterSet(
            [Adapter.model_validate(ADAPTERS[case.adapter][0])], None, QUANTISED.get(case.adapter)
        )
    return made


# --- the two sides ----------------------------------------------------------------------------------------------------


def run_case(case: LossCase) -> Curve:
    work = workload(case)
    engine = engine_of(case, work)
    mine = Slice(engine.data_rank, engine.data_world, case.micro)
    order, curve = GlobalOrder(len(work.train), BATCH, seed=1), Curve([], [], {}, {})
    for window in training_windows(work.train, work.collate, order, range(STEPS), mine, Loader()):
        loss = engine.forward_backward(window.micro_batches)
        curve.gradients = curve.gradients or {n: g.float().clone() for n, g in engine.gradients().items()}
        curve.losses.append(engine.summed(loss).item())
        if engine.term_shares is not None:
            curve.terms.append(engine.summed(engine.term_shares.clone()).tolist())
        curve.norms.append(engine.optimizer_step(1.0).grad_norm.item())
    engine.close()
    return curve


def run_cases(cases: Sequence[LossCase]) -> list[Curve]:
    return [run_case(case) for case in cases]


def whole_loss(kind: str, model: nn.Module, other: nn.Module, batch: Batch) -> tuple[Tensor, list[float]]:
    """The loss of a whole batch, and its terms."""
    targets, given = batch["targets"], {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    logits, tokens = model(**given, use_cache=False).logits, (targets != IGNORED).sum(1)
    own = log_probabilities(logits, targets)
    with torch.no_grad():
        teacher_logits = other(**given, use_cache=False).logits
    if kind == "distil":
        return divergence(logits, teacher_logits, targets) / tokens.sum(), []
    if kind == "mixture":
        terms = [-F.logsigmoid(own / 20).mean(), -own.sum() / tokens.sum()]
        return terms[0] + 0.5 * terms[1], [term.item() for term in terms]
    rewards = (own - log_probabilities(teacher_logits, targets)) / tokens
    if kind == "kto":
        return kto(rewards, tokens, rewards.mean().detach()).mean(), []
    return sorted_pairs(rewards) / len(rewards), []


def plain(case: LossCase) -> Curve:
    """One process, whole batches, plain PyTorch and PEFT."""
    work = workload(case)
    adapters, work.adapters = work.adapters, None
    model = work.build_model()
    if case.adapter in QUANTISED:
        round_weights(model, QUANTISED[case.adapter].format)
    if adapters is not None:
        model = get_peft_model(model, ADAPTERS[str(case.adapter)][1]())  # type: ignore[arg-type, assignment]
    other, optimizer = teacher(), OPTIMIZERS["sgd"]
    updates = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=optimizer.lr, momentum=0.9)
    order, curve = GlobalOrder(len(work.train), BATCH, seed=1), Curve([], [], {}, {})
    for step in range(STEPS):
        epoch, indices = order.batch(step)
        batch = work.collate([work.train.load(int(index), epoch) for index in indices])
        loss, terms = whole_loss(case.loss, model, other, batch)
        loss.backward()
        curve.gradients = curve.gradients or {
            name.removeprefix("base_model.model."): p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        curve.terms += [terms] if terms else []
        curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.clip).item())
        updates.step()
        updates.zero_grad()
        curve.losses.append(loss.item())
    return curve
