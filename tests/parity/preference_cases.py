"""Defines what the parity tests of preferences run: a small decoder on pairs of answers of uneven lengths, beside a
reference, on an engine's ranks and in plain PyTorch."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.adapter import Adapter
from drivetrain.config.language import LanguageModel
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.training import Loader
from drivetrain.data.language.samples import Pair, Sample, Steps
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Lengths, Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.models.adapters import AdapterSet
from drivetrain.workloads.preference import PreferenceWorkload
from drivetrain.workloads.process_reward import ProcessRewardWorkload
from drivetrain.workloads.reward import RewardWorkload
from drivetrain.workloads.unpaired import UnpairedWorkload
from tests.parity.cases import Curve
from tests.parity.mesh_cases import LLAMA, LORA, OPTIMIZERS, MeshCase, engine_of, round_weights

STEPS, BATCH, ROWS, CLIP, BETA, RATE = 6, 10, 34, 0.5, 0.5, 0.2


@dataclass(frozen=True)
class PairCase(MeshCase):
    """stage and preference: as in a run file. lora: whether adapters are trained, and the base is the reference. nf4:
    whether that base is in 4 bits. shared: whether packed sides share their prompt. ranks: of an engine that is no
    mesh."""

    stage: str = "dpo"
    preference: Mapping[str, Any] = field(default_factory=dict, hash=False)
    lora: bool = False
    packing: bool = True
    nf4: bool = False
    shared: bool = True
    ranks: int = 2

    @property
    def world(self) -> int:
        return self.ranks if super().world == 2 and "name" in self.degrees else super().world

    @property
    def clip(self) -> float:
        return CLIP

    @property
    def name(self) -> str:
        loss = json.dumps(self.preference.get("loss", self.stage))
        parts = [super().name, loss, *(["nf4"] if self.nf4 else []), *(["lora"] if self.lora else [])]
        parts += [] if self.packing else ["padded"]
        parts += [] if self.shared else ["unshared"]
        return "-".join([*parts, *([f"{self.ranks} ranks"] if self.ranks != 2 else [])])

    @property
    def alone(self) -> tuple[str, str, bool, bool]:
        """What decides the curve, however it is computed."""
        return self.stage, json.dumps({**self.preference}), self.lora, self.nf4


class Seeded(PreferenceWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


class SeededReward(RewardWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


class SeededSteps(ProcessRewardWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


class SeededUnpaired(UnpairedWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


KINDS: dict[str, Any] = {"kto": SeededUnpaired, "reward": SeededReward, "steps": SeededSteps}
BETAS: dict[str, dict[str, float]] = {"reward": {}}


def words(generator: torch.Generator, most: int) -> str:
    count = int(torch.randint(1, most, (1,), generator=generator))
    return " ".join("abcdefgh"[i] * 3 for i in torch.randint(0, 8, (count,), generator=generator).tolist())


def workload(case: PairCase) -> Any:
    path = Path(tempfile.gettempdir()) / f"preference-parity-{os.getpid()}.jsonl"
    generator = torch.Generator().manual_seed(12)
    rows: list[dict[str, Any]] = [
        {"prompt": words(generator, 4), "chosen": words(generator, 4), "rejected": ""} for _ in range(ROWS)
    ]
    for number, row in enumerate(rows):
        row["rejected"] = f"{words(generator, 7)} z"
        row["margin"] = number % 4 / 2
    if case.stage == "kto":
        labels = [number % 3 == 0 for number in range(ROWS)]
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}
            for row, label in zip(rows, labels, strict=True)
        ]
    kind = "steps" if case.preference.get("loss") == "steps" else case.stage
    if kind == "steps":
        rows = [marked_steps(row, number) for number, row in enumerate(rows)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = {"train": str(path), "template": "plain", "length": 60, "evaluation_fraction": 0.1, "packing": case.packing}
    block = {"type": "language_model", "stage": case.stage, "model": {"config": {**LLAMA, "vocab_size": 260}}}
    config = LanguageModel.model_validate(
        {**block, "data": data, "preference": {**BETAS.get(case.stage, {"beta": BETA}), **case.preference}}
    )
    adapters = [Adapter(rank=4)] if case.lora else None
    settled = config.preference.settled(case.stage, adapters)
    made = KINDS.get(kind, Seeded)(config.model_copy(update={"preference": settled}), seed=0)
    base = QuantisedBase(format="nf4") if case.nf4 else None
    made.adapters = AdapterSet(adapters, None, base) if adapters else None
    made.shares_prompts = case.shared
    return made


def marked_steps(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Returns an answer of one to three steps."""
    steps = [row["chosen"], row["rejected"], "so"][: number % 3 + 1]
    return {"prompt": row["prompt"], "completions": steps, "labels": [(number + n) % 3 > 0 for n in range(len(steps))]}


def run_case(case: PairCase) -> Curve:
    return curve_of(case, workload(case))


def curve_of(case: MeshCase, work: Any) -> Curve:
    """Trains on the case's engine."""
    curve = Curve([], [], {}, {})
    engine = engine_of(case, work)
    micro = -(-BATCH // engine.data_world // case.accumulation)
    assert work.lengths is not None
    mine = Slice(engine.data_rank, engine.data_world, micro, Lengths(np.asarray(work.lengths), 4, work.packs))
    order = GlobalOrder(len(work.train), BATCH, seed=1)
    for window in training_windows(work.train, work.collate, order, range(STEPS), mine, Loader()):
        loss = engine.forward_backward(window.micro_batches)
        curve.losses.append(engine.summed(loss).item())
        curve.norms.append(engine.optimizer_step(1.0).grad_norm.item())
    curve.weights = {name: weight.clone() for name, weight in engine.weights().items()}
    engine.close()
    return curve


def run_cases(cases: Sequence[PairCase]) -> list[Curve]:
    return [run_case(case) for case in cases]


# --- the same by hand -------------------------------------------------------------------------------------------------


def plain(case: PairCase) -> Curve:
    """One process, whole batches, each answer through the model by itself."""
    work, curve = workload(case), Curve([], [], {}, {})
    work.adapters = None
    model: Any = work.build_model()
    if case.nf4:
        round_weights(model, "nf4")
    reference = copy.deepcopy(model).requires_grad_(False)
    if case.lora:
        task = {"task_type": "TOKEN_CLS"} if case.preference.get("loss") == "steps" else {}
        model = get_peft_model(model, LoraConfig(**{**LORA, **task}))  # type: ignore[arg-type]
    trained = [p for p in model.parameters() if p.requires_grad]
    updates = torch.optim.SGD(trained, lr=OPTIMIZERS["sgd"].lr, momentum=0.9)
    order = GlobalOrder(len(work.train), BATCH, seed=1)
    for step in range(STEPS):
        epoch, indices = order.batch(step)
        loaded = [work.train.load(int(index), epoch) for index in indices]
        if case.stage == "reward":
            loss = steps(model, loaded) if case.preference.get("loss") == "steps" else reward(model, loaded)
            step_on(curve, loss, trained, updates)
            continue
        groups = [each[:2] for each in loaded]
        policy, tokens = sides(model, groups)
        with torch.no_grad():
            compared, _ = sides(reference, groups)
        if case.stage == "kto":
            loss = kto(policy, compared, torch.tensor([each.desirable for each in loaded]))
        else:
            loss = losses(case, policy, compared, tokens)
        step_on(curve, loss, trained, updates)
    return curve


def step_on(curve: Curve, loss: Tensor, trained: list[Any], updates: torch.optim.Optimizer, clip: float = CLIP) -> None:
    loss.backward()
    curve.losses.append(loss.item())
    curve.norms.append(nn.utils.clip_grad_norm_(trained, clip).item())
    updates.step()
    updates.zero_grad()


def reward(model: Any, pairs: Sequence[Pair]) -> Tensor:
    """Bradley and Terry's loss with margins and a centring of 0.1, each answer scored by itself."""
    scores = [model(input_ids=torch.tensor(ids.astype(np.int64))[None]).logits[0, 0] for p in pairs for ids, _ in p[:2]]
    chosen, rejected = torch.stack(scores).view(-1, 2).unbind(1)
    margins = torch.tensor([pair.margin for pair in pairs])
    return -F.logsigmoid(chosen - rejected - margins).mean() + 0.1 * (chosen + rejected).square().mean()


def steps(model: Any, answers: Sequence[Steps]) -> Tensor:
    """The mean cross-entropy over the last tokens of all steps, each answer through the model by itself."""
    logits = [model(input_ids=torch.tensor(each.own[0].astype(np.int64))[None]).logits[0] for each in answers]
    ends = [torch.tensor(each.own[1]) for each in answers]
    labels = torch.cat([torch.tensor(each.labels)[end] for each, end in zip(answers, ends, strict=True)])
    found = torch.cat([each[end] for each, end in zip(logits, ends, strict=True)])
    return F.cross_entropy(found, labels.long())


def kto(policy: Tensor, reference: Tensor, desirable: Tensor) -> Tensor:
    """The paper's formula: (N, 2), an answer and the prompt's with another sample's answer."""
    own, mismatched = (policy - reference).unbind(1)
    kl = mismatched.mean().clamp(min=0).detach()
    value = torch.where(desirable, torch.sigmoid(BETA * (own - kl)), torch.sigmoid(BETA * (kl - own)))
    return (torch.where(desirable, 1.5, 0.75) * (1 - value)).mean()


def sides(model: Any, pairs: Sequence[Sequence[Sample]]) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each answer, and its tokens, (P, 2)."""
    found, counts = [], []
    for ids, targets in (side for pair in pairs for side in pair):
        tokens, places = torch.tensor(ids.astype(np.int64)), torch.tensor(targets[1:])
        logits = model(input_ids=tokens[None, :-1]).logits[0][places]
        found.append(logits.log_softmax(-1).gather(1, tokens[1:][places][:, None]).sum())
        counts.append(places.sum())
    return torch.stack(found).view(-1, 2), torch.stack(counts).view(-1, 2)


def losses(case: PairCase, policy: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
    """The papers' formulas, over the whole batch."""
    ratios = policy - reference
    chosen, rejected = ratios.unbind(1)
    match case.preference.get("loss", case.stage):
        case "dpo":
            return -F.logsigmoid(BETA * (chosen - rejected)).mean()
        case {"sigmoid": weight, "sft": other}:
            likelihood = -policy[:, 0].sum() / tokens[:, 0].sum()
            return -weight * F.logsigmoid(BETA * (chosen - rejected)).mean() + other * likelihood
        case "aot_unpaired":
            return -F.logsigmoid(BETA * (chosen.sort().values - rejected.sort().values)).mean()
        case "bco_pair":
            shift = BETA * ratios.mean().detach()
            return (-F.logsigmoid(BETA * chosen - shift) - F.logsigmoid(shift - BETA * rejected)).mean()
        case "orpo":
            average = policy / tokens
            odds = average - torch.log1p(-average.exp())
            return (-average[:, 0] - BETA * F.logsigmoid(odds[:, 0] - odds[:, 1])).mean()
    raise AssertionError(case)
