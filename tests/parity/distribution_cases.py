"""Defines what the parity tests of losses over distributions run: a small decoder beside a larger one or itself, on
conversations of uneven lengths, on an engine's ranks and in plain PyTorch."""

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
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_model
from torch import Tensor, nn

from drivetrain.config.adapter import Adapter
from drivetrain.config.language import LanguageModel
from drivetrain.data.order import GlobalOrder
from drivetrain.models.adapters import AdapterSet
from drivetrain.workloads.distillation import DistillationWorkload
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.weighted_likelihood import WeightedLikelihoodWorkload
from tests.parity.cases import Curve
from tests.parity.mesh_cases import LLAMA, LORA, OPTIMIZERS, MeshCase
from tests.parity.preference_cases import BATCH, ROWS, STEPS, curve_of, step_on, words

OWN = {**LLAMA, "vocab_size": 260}


@dataclass(frozen=True)
class DistributionCase(MeshCase):
    """distillation: the block of a run file, without the teacher. sft: that of stage sft, in its place. teacher:
    its precision. ranks: of an engine that is no mesh."""

    distillation: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sft: Mapping[str, Any] = field(default_factory=dict, hash=False)
    lora: bool = False
    packing: bool = True
    ranks: int = 2
    teacher: str | None = None

    @property
    def world(self) -> int:
        return self.ranks if super().world == 2 and "name" in self.degrees else super().world

    @property
    def clip(self) -> float:
        return 0.02 if self.lora else 0.1 if self.sft else 0.2

    @property
    def name(self) -> str:
        loss = json.dumps(self.settings)
        more = f"{'-lora' if self.lora else ''}{'' if self.packing else '-padded'}"
        more += f"-{self.teacher}" if self.teacher else ""
        return f"{super().name}-{loss}{more}{f'-{self.ranks} ranks' if self.ranks != 2 else ''}"

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.distillation, **self.sft}

    @property
    def alone(self) -> tuple[str, bool]:
        """What decides the curve, however it is computed."""
        return json.dumps(self.settings), self.lora


class Seeded(DistillationWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


class SeededWeighted(WeightedLikelihoodWorkload):
    def build_model(self) -> nn.Module:
        """Of distributions that are far from even: the weights of tokens differ."""
        torch.manual_seed(3)
        model: Any = super().build_model()
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(30)
        return model


def block(case: DistributionCase, stage: str) -> dict[str, Any]:
    path = Path(tempfile.gettempdir()) / f"distillation-parity-{os.getpid()}.jsonl"
    generator = torch.Generator().manual_seed(12)
    rows = [{"instruction": words(generator, 4), "output": words(generator, 7)} for _ in range(ROWS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = {"train": str(path), "template": "plain", "length": 60, "evaluation_fraction": 0.1, "packing": case.packing}
    return {"type": "language_model", "stage": stage, "model": {"config": OWN}, "data": data}


def teacher(case: DistributionCase) -> Path:
    """A larger decoder with the model's tokenizer, of distributions that are far from even."""
    folder = Path(tempfile.gettempdir()) / f"distillation-parity-{os.getpid()}"
    if not folder.exists():
        torch.manual_seed(8)
        config = transformers.AutoConfig.for_model(**{**OWN, "hidden_size": 48, "num_hidden_layers": 2})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(40)
        config.save_pretrained(folder)
        save_model(model, str(folder / "model.safetensors"), {"format": "pt"})  # Transformers' own: on one rank alone
        alone = LanguageModelWorkload(LanguageModel.model_validate(block(case, "sft")), seed=0)
        alone.tokenizer.save_pretrained(folder)
    return folder


def workload(case: DistributionCase) -> Any:
    adapters = [Adapter(rank=4)] if case.lora else None
    work: Any
    if case.sft:
        config = LanguageModel.model_validate({**block(case, "sft"), "sft": case.sft})
        work = SeededWeighted(config.model_copy(update={"sft": config.sft.settled(adapters)}), seed=0)
    else:
        learned = {**case.distillation, "teacher": {"path": str(teacher(case)), "precision": case.teacher}}
        work = Seeded(LanguageModel.model_validate({**block(case, "distill"), "distillation": learned}), seed=0)
    work.adapters = AdapterSet(adapters, None) if adapters else None
    return work


def run_cases(cases: Sequence[DistributionCase]) -> list[Curve]:
    return [curve_of(case, workload(case)) for case in cases]


# --- the same by hand -------------------------------------------------------------------------------------------------


def plain(case: DistributionCase) -> Curve:
    """One process, whole batches, each sample through both models by itself, in fp64: a divergence near 0 is a sum of
    differences, which fp32 rounds by 2e-5 of it, one way or another with the number of threads."""
    work, curve = workload(case), Curve([], [], {}, {})
    work.adapters = None
    model: Any = work.build_model()
    beside: Any = copy.deepcopy(model)
    if not case.sft:
        beside = transformers.AutoModelForCausalLM.from_pretrained(teacher(case))
    beside.requires_grad_(False)
    if case.lora:
        model = get_peft_model(model, LoraConfig(**LORA))  # type: ignore[arg-type]
    model, beside = model.double(), beside.double()
    trained = [p for p in model.parameters() if p.requires_grad]
    updates = torch.optim.SGD(trained, lr=OPTIMIZERS["sgd"].lr, momentum=0.9)
    order = GlobalOrder(len(work.train), BATCH, seed=1)
    for step in range(STEPS):
        epoch, indices = order.batch(step)
        samples = [work.train.load(int(index), epoch) for index in indices]
        found = torch.cat([losses(case, model, beside, *sample) for sample in samples])
        step_on(curve, found.mean(), trained, updates, case.clip)
    return curve


def losses(case: DistributionCase, model: Any, beside: Any, ids: np.ndarray, targets: np.ndarray) -> Tensor:
    """The loss of each target of a sample by the papers' formulas."""
    tokens, places = torch.tensor(ids.astype(np.int64)), torch.tensor(targets[1:])
    heat = case.distillation.get("temperature", 1.0)
    own, other = (each(input_ids=tokens[None, :-1]).logits[0][places] for each in (model, beside))
    q, p = (own / heat).softmax(1), (other / heat).softmax(1)
    forward = (p * ((other / heat).log_softmax(1) - (own / heat).log_softmax(1))).sum(1)
    likelihoods = -own.log_softmax(1).gather(1, tokens[1:][places][:, None])[:, 0]
    weighted = likelihoods * torch.exp(-likelihoods).detach()
    match case.settings["loss"]:
        case "dft":
            return weighted
        case "asft":
            return weighted + 2 * forward
        case "eaft":
            shares = own.detach().sort(descending=True).values[:, :20].softmax(1)
            return likelihoods * -(shares * shares.log()).sum(1) / 3
        case "forward_kl":
            return forward
        case "reverse_kl":
            return (q * (q / p).log()).sum(1)
        case {"js": weight, "sft": likelihood}:
            m = (p + q) / 2
            js = 0.5 * (p * (p / m).log()).sum(1) + 0.5 * (q * (q / m).log()).sum(1)
            return weight * js + likelihood * likelihoods
    raise AssertionError(case)
