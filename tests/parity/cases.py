"""Defines what the parity tests run: the same twelve steps on an engine's ranks and in plain PyTorch in one process."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.engines import EngineConfig
from drivetrain.config.training import Loader, Optimizer
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.engines.base import Engine
from drivetrain.numerics.emulation import fp32_products
from tests.device import chosen_device, on
from tests.tiny_workload import FEATURES, IGNORED, Rows, TinyWorkload, perceptron, tiny_engine

STEPS, BATCH, SAMPLES = 12, 20, 90  # the last batch of an epoch has 10
CLIP = 0.5
ON_DEVICE = ("single", "ddp")  # engines whose cases run on the tests' device
VOCABULARY, LONGEST = 30, 17
OPTIMIZERS = {
    "sgd": Optimizer(name="sgd", lr=0.5, momentum=0.9),
    "adamw": Optimizer(name="adamw", lr=0.01, weight_decay=0.1),
    "adamw8bit": Optimizer(name="adamw8bit", lr=0.01, weight_decay=0.1),
    "adamw4bit": Optimizer(name="adamw4bit", lr=0.01, weight_decay=0.1),
    "adamw-fp8": Optimizer(name="adamw-fp8", lr=0.01, weight_decay=0.1),
    "bitsandbytes": Optimizer(name="bnb-adamw8bit", lr=0.01, weight_decay=0.1),
    "adafactor": Optimizer(name="adafactor", lr=0.05, weight_decay=0.1),
    "galore": Optimizer(name="galore", lr=0.02, weight_decay=0.1, options={"rank": 4, "update_proj_gap": 3}),
}


@dataclass(frozen=True)
class Case:
    engine: str
    world: int
    precision: str = "fp32"
    accumulation: int = 1
    optimizer: str = "sgd"
    model: str = "perceptron"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    recompute: Any = False
    compile: bool = False

    @property
    def name(self) -> str:
        extra = [f"{key}={value}" for key, value in self.options.items()]
        extra += [f"recompute={self.recompute}"] if self.recompute else []
        extra += ["compiled"] if self.compile else []
        parts = [self.engine, *extra, f"x{self.world}", self.precision, f"acc{self.accumulation}"]
        return "-".join([*parts, self.optimizer, self.model]).replace(" ", "")

    @property
    def shown(self) -> str:
        """The engine with its options, as the table of the docs has it."""
        options = [f"{key}: {value}" for key, value in self.options.items()]
        options += [f"recompute: {str(self.recompute).lower()}"] if self.recompute else []
        options += ["compiled"] if self.compile else []
        return f"{self.engine} ({', '.join(options)})" if options else self.engine

    @property
    def updates(self) -> Optimizer:
        """16 bits at a lower rate: at 0.5 with momentum its rounding alone, of the same batch cut in another way in one
        process, grows to 3e-2 within twelve steps."""
        if self.precision.startswith("bf16") and self.optimizer == "sgd":
            return Optimizer(name="sgd", lr=0.1, momentum=0.9)
        return OPTIMIZERS[self.optimizer]

    @property
    def processes(self) -> int:
        return 1 if self.engine in {"single", "dp"} else self.world


@dataclass
class Curve:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before clipping
    weights: dict[str, Tensor]  # at the end
    terms: list[list[float]] = field(default_factory=list)  # of a loss of several


# --- what is trained -------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A small Transformer encoder that labels every token; no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, features: Tensor) -> Tensor:
        """(B, T) token ids, 0 where there is none → (B, T, 5)."""
        hidden = self.embedding(features)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=features == 0)
        return self.head(hidden)


class Sentences(Rows):
    """Token ids of uneven lengths, and a label for each but some."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, LONGEST + 1, (num_samples,), generator=generator).tolist()
        self.features = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in lengths]  # type: ignore[assignment]
        self.labels = [torch.where(ids % 7 == 0, IGNORED, ids % 5) for ids in self.features]  # type: ignore[assignment]
        self.lengths = lengths
        self.names = [f"sentence {i}" for i in range(num_samples)]


class Tagging(TinyWorkload):
    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        features, labels = zip(*samples, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return {
            "features": pad(list(features), batch_first=True),
            "labels": pad(list(labels), batch_first=True, padding_value=IGNORED),
        }

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["features"]).float().flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum", ignore_index=IGNORED)


def tagger() -> nn.Module:
    torch.manual_seed(11)
    return Tagger()


def workload(model: str) -> TinyWorkload:
    evaluation = Rows(37, seed=9)
    if model == "tagger":
        return Tagging(tagger, Sentences(SAMPLES))
    if model == "dropout":
        return TinyWorkload(with_dropout, Rows(SAMPLES, ignored_share=0.15), evaluation)
    if model in BUILDERS:
        return TinyWorkload(BUILDERS[model], Rows(SAMPLES, ignored_share=0.15), evaluation)
    return TinyWorkload(perceptron, Rows(SAMPLES, ignored_share=0.15), evaluation)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.gelu(self.linear(self.norm(hidden)))


def blocks() -> nn.Module:
    """Blocks that recompute and wrapping find, of sizes that no world divides."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 13), nn.Sequential(*(Block(13) for _ in range(3))), nn.Linear(13, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(blocks(), nn.Dropout(0.3))


def wide() -> nn.Module:
    """Matrices of 16,384 numbers, large enough for quantised moments also when two ranks share them."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.Sequential(*(Block(128) for _ in range(2))), nn.Linear(128, 3))


def uneven() -> nn.Module:
    """Of two ranks' shards of the second weight both are whole blocks of 256, of the fourth's one: 8,320 and 8,192."""
    torch.manual_seed(5)
    widths = (FEATURES, 256, 33, 128, 129, 3)
    return nn.Sequential(*(nn.Linear(*sizes) for sizes in itertools.pairwise(widths)))


BUILDERS = {"blocks": blocks, "wide": wide, "uneven": uneven}


# --- the two sides ---------------------------------------------------------------------------------------------------


def device_of(case: Case) -> str:
    """Ranks that share a GPU exchange over gloo, which DeepSpeed and Accelerate would not take there, and whose
    reduce-scatter of a GPU's tensors, which FSDP asks for, ends the process (torch 2.11)."""
    return chosen_device() if case.engine in ON_DEVICE else "cpu"


def engine_of(case: Case, work: TinyWorkload) -> Engine:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # Accelerate sets it for the life of the process
    config = TypeAdapter(EngineConfig).validate_python({"name": case.engine, **case.options})
    return tiny_engine(
        work,
        case.precision,
        case.updates,
        config=config,
        max_grad_norm=CLIP,
        recompute=case.recompute,
        compile=case.compile,
        devices=case.world,
        device=device_of(case),
    )


def run_case(case: Case, work: TinyWorkload | None = None) -> Curve:
    """This rank's part; the weights on the first rank only. work: in place of the one that the case names."""
    work = work or workload(case.model)
    with fp32_products(case.precision != "fp32"):
        engine = engine_of(case, work)
        micro = -(-BATCH // case.processes // case.accumulation)
        mine = Slice(engine.data_rank, engine.data_world, micro)
        order = GlobalOrder(SAMPLES, BATCH, seed=1)
        curve = Curve([], [], {}, {})
        for window in training_windows(work.train, work.collate, order, range(STEPS), mine, Loader()):
            loss = engine.forward_backward(window.micro_batches)
            curve.gradients = curve.gradients or {n: g.float().cpu().clone() for n, g in engine.gradients().items()}
            curve.losses.append(engine.summed(loss).item())
            curve.norms.append(engine.optimizer_step(1.0).grad_norm.item())
        curve.weights = {name: weight.cpu().clone() for name, weight in engine.weights().items()}
        engine.close()
    return curve


def run_cases(cases: Sequence[Case]) -> list[Curve]:
    return [run_case(case) for case in cases]


def plain(case: Case, work: TinyWorkload | None = None, given: nn.Module | None = None) -> Curve:
    """One process, whole batches, torch's own autocast and clipping: what every case must come to. given: a model in
    place of the workload's."""
    work = work or workload(case.model)
    device = device_of(case)
    model, optimizer = (given or work.build_model()).to(device), case.updates
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    updates: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=optimizer.lr)
    if optimizer.name == "sgd":
        updates = torch.optim.SGD(groups, lr=optimizer.lr, momentum=optimizer.momentum)
    compute = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(case.precision)
    order, curve = GlobalOrder(SAMPLES, BATCH, seed=1), Curve([], [], {}, {})

    def copied(features: Tensor) -> Tensor:
        """With bf16 copies of the weights, through which gradients come to the fp32 ones."""
        copies = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
        inputs = features.bfloat16() if features.is_floating_point() else features
        return torch.func.functional_call(model, copies, inputs)

    with fp32_products(case.precision != "fp32"):
        for step in range(STEPS):
            batch = on(device, work.collate([work.train.load(int(i), 0) for i in order.batch(step)[1]]))
            with torch.autocast(device, dtype=compute) if compute else contextlib.nullcontext():
                logits = (copied if case.precision == "bf16-master" else model)(batch["features"]).float()
                labels = batch["labels"]
                loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
            loss.backward()
            curve.gradients = curve.gradients or {
                name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None
            }
            curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            updates.step()
            updates.zero_grad()
            curve.losses.append(loss.item())
    curve.weights = on("cpu", model.state_dict())
    return curve


def largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
