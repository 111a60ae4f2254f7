"""Defines what the parity tests of learning from rewards run: answers drawn from a small decoder, rewarded by a
function, on an engine's ranks and in plain PyTorch."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.run import RunConfig
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder, RepeatedOrder
from drivetrain.training.windows import windows_of
from drivetrain.workloads.policy import PolicyWorkload
from drivetrain.workloads.ppo import PpoWorkload
from tests.parity.cases import Curve
from tests.parity.mesh_cases import OPTIMIZERS, MeshCase, engine_of
from tests.workloads.policy_cases import LONGEST, Seeded, configured, log_probabilities

STEPS, BATCH, CLIP, BETA, UPDATES, PASSES, ANSWERS = 6, 5, 0.5, 0.3, 2, 2, 3
REWARD = {"use": "tests.rewards.scores:letters"}


@dataclass(frozen=True)
class PolicyCase(MeshCase):
    """stage, learning: as in a run file. shared: whether packed answers share their prompt."""

    stage: str = "grpo"
    learning: Mapping[str, Any] = field(default_factory=dict, hash=False)
    packing: bool = True
    shared: bool = True

    @property
    def clip(self) -> float:
        return CLIP

    @property
    def name(self) -> str:
        how = f"{'' if self.packing else '-padded'}{'' if self.shared else '-unshared'}"
        return f"{super().name}-{self.stage}-{self.learning}{how}"


class SeededPpo(PpoWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


def workload(case: PolicyCase) -> PolicyWorkload:
    folder = Path(tempfile.gettempdir()) / f"policy-parity-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    learning = {"rewards": REWARD, "answers": ANSWERS, "updates": UPDATES, "passes": PASSES, **case.learning}
    kind = SeededPpo if case.stage == "ppo" else Seeded
    made = kind(configured(folder, case.stage, **learning, data={"packing": case.packing}), seed=0)
    made.shares_prompts = case.shared
    return made


def run_config() -> RunConfig:
    block = {"type": "module", "path": "none.py"}
    return RunConfig.model_validate({"workload": block, "batch_size": BATCH, "loop": {"steps": STEPS}, "seed": 5})


def order_of(work: PolicyWorkload) -> RepeatedOrder:
    return RepeatedOrder(GlobalOrder(len(work.train), BATCH, seed=1), work.steps_per_batch)


def run_case(case: PolicyCase, pieces: int = 3) -> tuple[Curve, list[list[str]]]:
    """Returns the curve, and the answers of each step. pieces: micro-batches of a step, on each rank."""
    work, curve, answers = workload(case), Curve([], [], {}, {}), []
    engine = engine_of(case, work)
    mine = Slice(engine.data_rank, engine.data_world, -(-BATCH * ANSWERS // UPDATES // engine.data_world // pieces))
    for window in windows_of(run_config(), work, engine, order_of(work), range(STEPS), mine):
        curve.losses.append(engine.summed(engine.forward_backward(window.micro_batches)).item())
        curve.norms.append(engine.optimizer_step(1.0).grad_norm.item())
        answers.append([work.decoded(each["ids"].tolist()) for each in work.made])
    engine.close()
    return curve, answers


def run_cases(cases: Sequence[PolicyCase]) -> list[tuple[Curve, list[list[str]]]]:
    return [run_case(case) for case in cases]


# --- the same by hand -------------------------------------------------------------------------------------------------


def plain(case: PolicyCase, answers: list[list[str]]) -> Curve:
    """One process, each answer through the model by itself; which answers were drawn is taken from `answers`, and their
    rewards, advantages and loss are worked out anew."""
    work, curve = workload(case), Curve([], [], {}, {})
    drawn = recorded(case)
    model: Any = work.build_model().eval()
    reference = copy.deepcopy(model)
    updates = torch.optim.SGD(model.parameters(), lr=OPTIMIZERS["sgd"].lr, momentum=0.9)
    for step in range(STEPS):
        first = step - step % (UPDATES * PASSES)
        if step == first:
            samples = drawn[step]
            assert [work.decoded(each["ids"].tolist()) for each in samples] == answers[step]
            with torch.no_grad():
                olds = [log_probabilities(model, each) for each in samples]
                beside = [log_probabilities(reference, each) for each in samples]
            advantages = by_group([letters(work.decoded(each["ids"][each["prompt"] :].tolist())) for each in samples])
        turn, update = divmod(step - first, UPDATES)
        chosen = np.array_split(np.random.default_rng([5, first, 1 + turn]).permutation(len(samples)), UPDATES)[update]
        parts = [part(case, log_probabilities(model, samples[i]), olds[i], beside[i], advantages[i]) for i in chosen]
        parts = [each * case.learning.get("importance_cap", 1.0) for each in parts]
        tokens = sum(len(olds[i]) for i in chosen)
        loss = torch.stack(parts).sum() / (tokens if case.learning.get("loss") == "dapo" else len(chosen))
        loss.backward()
        curve.losses.append(loss.item())
        curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        updates.step()
        updates.zero_grad()
    return curve


def recorded(case: PolicyCase) -> dict[int, list[dict[str, Any]]]:
    """Returns the answers that one process draws at each step: their ids alone."""
    work, found = workload(case), {}
    engine = engine_of(PolicyCase({"name": "single"}, stage=case.stage, learning=case.learning), work)
    mine = Slice(0, 1, BATCH * ANSWERS)
    for window in windows_of(run_config(), work, engine, order_of(work), range(STEPS), mine):
        found[window.step] = [{"ids": each["ids"], "prompt": each["prompt"]} for each in work.made]
        engine.forward_backward(window.micro_batches)
        engine.optimizer_step(1.0)
    engine.close()
    return found


def letters(text: str) -> float:
    return float(sum(letter.isascii() and letter.isalpha() for letter in text))


def by_group(rewards: Sequence[float]) -> list[float]:
    groups = np.asarray(rewards).reshape(-1, ANSWERS)
    found = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)
    return [float(each) for each in found.flatten()]


def part(case: PolicyCase, logs: Tensor, old: Tensor, reference: Tensor, advantage: float) -> Tensor:
    """An answer's part of the loss, which the number of answers, or of tokens, divides."""
    ratio = (logs - old).exp()
    if case.learning.get("importance") == "sequence":
        ratio = (logs - old).mean().exp()[None]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    if case.learning.get("loss") == "dapo":
        return loss.sum()
    beta = case.learning.get("beta", 0.0)
    q = (reference - logs).exp()
    assert len(old) <= LONGEST
    return loss.mean() + beta * (q - q.log() - 1).mean()
