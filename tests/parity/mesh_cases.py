"""Defines what the mesh's parity tests run: a small decoder, an encoder and a plain module over (pp, dp, cp, tp) ranks,
and the same twelve steps by hand in one process."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig, PrefixTuningConfig, PromptEncoderConfig, get_peft_model
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from drivetrain.config.adapter import Adapter
from drivetrain.config.engines import EngineConfig
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.training import Loader, Optimizer, Scaler
from drivetrain.config.workload import LanguageModel, TextClassification
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Lengths, Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.engines.base import Engine
from drivetrain.models.adapters import AdapterSet
from drivetrain.numerics.emulation import fp32_products
from drivetrain.workloads.base import Layout, Workload
from drivetrain.workloads.language_model import IGNORED, LanguageModelWorkload
from drivetrain.workloads.text_classification import TextClassificationWorkload
from tests.parity.cases import CLIP, Curve, largest
from tests.parity.table import Row, add_row
from tests.tiny_workload import FEATURES, Rows, TinyWorkload, tiny_engine

STEPS, BATCH, LENGTH = 12, 10, 16  # windows of a step; tokens of a window
OPTIMIZERS = {
    "sgd": Optimizer(name="sgd", lr=0.1, momentum=0.9),
    "adamw": Optimizer(name="adamw", lr=0.001, weight_decay=0.1),
}
LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, tuple[dict[str, Any], Callable[[], PeftConfig]]] = {  # ours, and the same through plain PEFT
    "lora": ({"rank": 4}, lambda: LoraConfig(**LORA)),  # type: ignore[arg-type]
    "dora": (
        {"rank": 4, "dora": True, "targets": TARGETS, "rslora": True},
        lambda: LoraConfig(**LORA, use_dora=True, use_rslora=True),  # type: ignore[arg-type]
    ),
    "pissa": ({"rank": 4, "pissa": True}, lambda: LoraConfig(**LORA, init_lora_weights="pissa")),  # type: ignore[arg-type]
    "qlora": ({"rank": 4}, lambda: LoraConfig(**LORA)),  # type: ignore[arg-type]
    "int8lora": ({"rank": 4}, lambda: LoraConfig(**LORA)),  # type: ignore[arg-type]
    "oft": (
        {"method": "oft", "block_size": 16},
        lambda: OFTConfig(r=0, oft_block_size=16, target_modules=TARGETS, task_type="CAUSAL_LM"),
    ),
    "qoft": (
        {"method": "oft", "block_size": 16},
        lambda: OFTConfig(r=0, oft_block_size=16, target_modules=TARGETS, task_type="CAUSAL_LM"),
    ),
    "ia3": ({"method": "ia3"}, lambda: IA3Config(task_type="CAUSAL_LM")),
    "prefix": (
        {"method": "prefix", "virtual_tokens": 4},
        lambda: PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    ),
    "ptuning": (
        {"method": "p-tuning", "virtual_tokens": 3, "hidden_size": 16},
        lambda: PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    ),
}
QUANTISED = {
    "qlora": QuantisedBase(format="nf4"),
    "qoft": QuantisedBase(format="nf4"),
    "int8lora": QuantisedBase(format="int8"),
}
WIDE = {"hidden_size": 128, "intermediate_size": 256}  # of which two ranks have whole blocks of NF4's codes
PHI: dict[str, Any] = {"model_type": "phi", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "qk_layernorm": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {"num_key_value_heads": 2},
    "dropout": {"attention_dropout": 0.2},
    "tied": {"tie_word_embeddings": True},
    "windowed": {"model_type": "mistral", "sliding_window": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},  # norms of heads, whose gradients its plan says to sum
    "phi": PHI,  # such norms too, of which its plan says nothing
}


@dataclass(frozen=True)
class MeshCase:
    degrees: dict[str, Any] = field(hash=False)
    precision: str = "fp32"
    accumulation: int = 3
    optimizer: str = "sgd"
    model: str = "llama"
    recompute: Any = False
    compile: bool = False

    @property
    def world(self) -> int:
        if "name" in self.degrees:  # another engine, on two ranks
            return 1 if self.degrees["name"] == "single" else 2
        sizes = [int(self.degrees.get(axis, 1)) for axis in ("pp", "dp", "cp", "tp")]
        return sizes[0] * sizes[1] * sizes[2] * sizes[3]

    @property
    def adapter(self) -> str | None:
        """Returns what is trained beside the model: sft-lora."""
        return next((part for part in self.model.split("-") if part in ADAPTERS), None)

    @property
    def clip(self) -> float:
        """Small enough to clip."""
        return 0.05 if self.model == "bert" else 0.02 if self.adapter else CLIP

    @property
    def shown(self) -> str:
        """The degrees with what else was chosen, as the table of the docs has it."""
        if "name" in self.degrees:
            others = [f"{key}: {value}" for key, value in self.degrees.items() if key != "name"]
            return f"{self.degrees['name']} ({', '.join([*others, self.model])})"
        axes = " x ".join(f"{key}={value}" for key, value in self.degrees.items() if key in ("pp", "dp", "cp", "tp"))
        others = [key if value is True else str(value) for key, value in self.degrees.items() if key not in axes]
        others += [f"recompute: {str(self.recompute).lower()}"] if self.recompute else []
        others += ["compiled"] if self.compile else []
        others += [self.model] if self.model != "llama" else []
        return f"mesh {axes}" + (f" ({', '.join(others)})" if others else "")

    @property
    def name(self) -> str:
        parts = [f"{key}{'' if value is True else value}" for key, value in self.degrees.items()]
        parts += [self.precision, f"acc{self.accumulation}", self.optimizer, self.model]
        parts += [f"recompute={self.recompute}"] if self.recompute else []
        return "-".join([*parts, *(["compiled"] if self.compile else [])])


def text() -> Path:
    """Some bytes that a model can learn something of; the last window is cut short."""
    path = Path(tempfile.gettempdir()) / f"mesh-parity-{os.getpid()}.txt"
    generator = torch.Generator().manual_seed(2)
    words = ["".join(chr(97 + int(c)) for c in torch.randint(0, 26, (4,), generator=generator)) for _ in range(12)]
    picked = torch.randint(0, 12, (99,), generator=generator).tolist()
    path.write_text(" ".join(words[i] for i in picked)[: 30 * LENGTH + 6])
    return path


class Columns(nn.Module):
    """A user's module that declares how it is split."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 12)
        self.layers = nn.ModuleList(Pair(12, nn.Dropout(rate) if rate else nn.GELU()) for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.inner(features)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Pair(nn.Module):
    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.act = act

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.back(self.act(self.wide(self.norm(hidden))))


class Learned(Columns):
    """With activations that have a weight: each tensor rank's gradient of it is of its own features."""

    def __init__(self) -> None:
        super().__init__()
        for pair in self.layers:
            pair.act = nn.PReLU()


class HalfFrozen(Columns):
    def __init__(self) -> None:
        super().__init__()
        for part in (self.inner, *self.layers[:2]):
            part.requires_grad_(False)


class Pictures(nn.Module):
    """A Transformers encoder without a plan of its own, within a module of the user's: (B, FEATURES) as a picture."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = ViTConfig(image_size=FEATURES, patch_size=4, num_labels=3, **sizes, **none)
        self.encoder = ViTForImageClassification(config)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.encoder(features[:, None, None].expand(-1, 3, FEATURES, -1)).logits
        return logits


def pictures() -> nn.Module:
    torch.manual_seed(6)
    return Pictures()


class Declared(TinyWorkload):
    @property
    def layout(self) -> Layout:
        return Layout(tensor_parallel={"layers.*.wide": "colwise", "layers.*.back": "rowwise"})


def columns() -> nn.Module:
    torch.manual_seed(5)
    return Columns()


def learned() -> nn.Module:
    torch.manual_seed(5)
    return Learned()


def half_frozen() -> nn.Module:
    torch.manual_seed(5)
    return HalfFrozen()


OWN = {"columns": columns, "learned": learned, "frozen": half_frozen}


class Seeded(LanguageModelWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


class SeededTexts(TextClassificationWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(4)
        return super().build_model()


def reviews() -> SeededTexts:
    """Of one to twelve words each, so that padding differs from batch to batch."""
    folder = Path(tempfile.gettempdir()) / f"mesh-parity-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    words = [f"w{number}" for number in range(20)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    generator = torch.Generator().manual_seed(8)
    rows = [
        [words[i] for i in torch.randint(0, 20, (length,), generator=generator).tolist()]
        for length in torch.randint(1, 13, (62,), generator=generator).tolist()
    ]
    lines = [f"{int('w3' in row or 'w7' in row)},{' '.join(row)}" for row in rows]
    (folder / "texts.csv").write_text("\n".join(["label,text", *lines]))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = {"tokenizer": str(folder / "vocab.txt"), "config": {"model_type": "bert", **sizes, **none}}
    data = {"train": str(folder / "texts.csv"), "cache": str(folder / "cache"), "evaluation_fraction": 0.1}
    data |= {"unpadded": False}  # as the rules settle it on a mesh
    return SeededTexts(TextClassification.model_validate({"model": model, "data": data}), seed=0)


def workload(case: MeshCase) -> Workload:
    made = _workload(case)
    if case.adapter is not None:
        blocks = [Adapter.model_validate(ADAPTERS[case.adapter][0])]
        made.adapters = AdapterSet(blocks, None, QUANTISED.get(case.adapter))
    return made


def _workload(case: MeshCase) -> Workload:
    if case.model in OWN:
        return Declared(OWN[case.model], Rows(62, ignored_share=0.15), Rows(37, seed=9))
    if case.model == "bert":
        return reviews()
    if case.model == "vit":
        return TinyWorkload(pictures, Rows(62), Rows(37, seed=9))
    if case.model.startswith("sft"):
        return chats("padded" not in case.model, "fused" in case.model, WIDE if "wide" in case.model else {})
    config = {**LLAMA, **VARIANTS.get(case.model, {})}
    block = {"type": "language_model", "model": {"config": config}}
    data = {"train": str(text()), "length": LENGTH, "evaluation_fraction": 0.1}
    return Seeded(LanguageModel.model_validate({**block, "data": data}), seed=0)


def chats(packing: bool, fused: bool, sizes: Mapping[str, Any]) -> Seeded:
    """Conversations of one to three replies of uneven lengths, of which the replies are targets."""
    path = Path(tempfile.gettempdir()) / f"mesh-parity-{os.getpid()}.jsonl"
    generator = torch.Generator().manual_seed(12)

    def words(most: int) -> str:
        count = int(torch.randint(1, most, (1,), generator=generator))
        return " ".join("abcdefgh"[i] * 3 for i in torch.randint(0, 8, (count,), generator=generator).tolist())

    turns = torch.randint(1, 4, (62,), generator=generator).tolist()
    rows = [[{"role": r, "content": words(5)} for _ in range(n) for r in ("user", "assistant")] for n in turns]
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    model = {"config": {**LLAMA, "vocab_size": 260, **sizes}, "fused_loss": fused}
    data = {"train": str(path), "template": "plain", "length": 60, "packing": packing, "evaluation_fraction": 0.1}
    block = {"type": "language_model", "stage": "sft", "model": model, "data": data}
    return Seeded(LanguageModel.model_validate(block), seed=0)


def engine_of(case: MeshCase, work: Workload, scaler: Scaler | None = None, trains: bool = True) -> Engine:
    config = TypeAdapter(EngineConfig).validate_python({"name": "mesh", **case.degrees})
    return tiny_engine(
        work,
        case.precision,
        OPTIMIZERS[case.optimizer],
        config=config,
        max_grad_norm=case.clip,
        recompute=case.recompute,
        compile=case.compile,
        devices=case.world,
        scaler=scaler,
        trains=trains,
    )


def run_case(case: MeshCase) -> Curve:
    work = workload(case)
    with fp32_products(case.precision != "fp32"):
        engine = engine_of(case, work)
        micro = -(-BATCH // engine.data_world // case.accumulation)
        lengths = None if work.lengths is None else Lengths(np.asarray(work.lengths), 10, work.packs)
        mine = Slice(engine.data_rank, engine.data_world, micro, lengths if case.model.startswith("sft") else None)
        order = GlobalOrder(len(work.train), BATCH, seed=1)
        curve = Curve([], [], {}, {})
        for window in training_windows(work.train, work.collate, order, range(STEPS), mine, Loader()):
            loss = engine.forward_backward(window.micro_batches)
            curve.gradients = curve.gradients or {n: g.float().clone() for n, g in engine.gradients().items()}
            curve.losses.append(engine.summed(loss).item())
            curve.norms.append(engine.optimizer_step(1.0).grad_norm.item())
        curve.weights = {name: weight.clone() for name, weight in engine.weights().items()}
        engine.close()
    return curve


def run_cases(cases: Sequence[MeshCase]) -> list[Curve]:
    return [run_case(case) for case in cases]


def logits_and_targets(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    if "features" in batch:
        return model(batch["features"]).float(), batch["labels"]
    if "labels" in batch:
        return model(**{name: t for name, t in batch.items() if name != "labels"}).logits.float(), batch["labels"]
    reported = {} if hasattr(model, "prompt_encoder") else {"position_ids": batch["position_ids"]}
    logits = model(input_ids=batch["input_ids"], **reported, use_cache=False).logits[:, -batch["targets"].shape[1] :]
    return logits.float().flatten(0, 1), batch["targets"].flatten()


def plain(case: MeshCase) -> Curve:
    """One process, whole batches, each sample a padded row, torch's own autocast and clipping."""
    padded = "sft-padded-wide" if "wide" in case.model else "sft-padded"
    work = workload(replace(case, model=padded) if case.model.startswith("sft") else case)
    model, optimizer = work.build_model(), OPTIMIZERS[case.optimizer]
    if case.adapter in QUANTISED:
        round_weights(model, QUANTISED[case.adapter].format)
    if case.adapter is not None:
        model = get_peft_model(model, ADAPTERS[case.adapter][1]())  # type: ignore[arg-type, assignment]
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    updates: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=optimizer.lr)
    if optimizer.name == "sgd":
        updates = torch.optim.SGD(groups, lr=optimizer.lr, momentum=optimizer.momentum)
    order, curve = GlobalOrder(len(work.train), BATCH, seed=1), Curve([], [], {}, {})
    with fp32_products(case.precision != "fp32"):
        for step in range(STEPS):
            epoch, indices = order.batch(step)
            batch = work.collate([work.train.load(int(index), epoch) for index in indices])
            mixed = torch.autocast("cpu", dtype=torch.bfloat16) if case.precision == "bf16-mixed" else None
            with mixed or contextlib.nullcontext():
                logits, targets = logits_and_targets(model, batch)
                loss = F.cross_entropy(logits, targets, ignore_index=IGNORED)
            loss.backward()
            curve.gradients = curve.gradients or {
                name.removeprefix("base_model.model."): p.grad.clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.clip).item())
            updates.step()
            updates.zero_grad()
            curve.losses.append(loss.item())
    curve.weights = model.state_dict()
    if case.adapter is not None:
        own = [name for name, p in model.named_parameters() if p.requires_grad]
        curve.weights = {name.removeprefix("base_model.model."): curve.weights[name] for name in own}
    return curve


@torch.no_grad()
def round_weights(model: nn.Module, form: str) -> None:
    """To what bitsandbytes' codes stand for; the head stays as it is. 4 bits as one long row: of rows that its blocks
    of 64 do not fill bitsandbytes 0.50 takes the wrong scales on AVX-512."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            if form == "nf4":
                row = module.weight.view(1, -1)
                codes, state = bnb.quantize_4bit(row, quant_type="nf4", compress_statistics=True)
                row.copy_(bnb.dequantize_4bit(codes, state))
            else:
                codes, scales, _ = bnb.int8_vectorwise_quant(module.weight.half())
                module.weight.copy_(codes * scales[:, None] / 127)


def check(case: MeshCase, ours: Curve, theirs: Curve) -> None:
    """Losses, norms, the first step's gradients and the names of weights; a row of the table."""
    assert sum(norm > case.clip for norm in theirs.norms) > 3, "clipping is active"
    differs = largest(ours.losses, theirs.losses), largest(ours.norms, theirs.norms)
    add_row(Row(case.shown, case.precision, case.world, *differs))
    four_stages = case.degrees.get("pp", 1) >= 4
    tolerance = (1e-4 if four_stages else 1e-5) if case.precision == "fp32" else 1e-2
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert ours.norms == pytest.approx(theirs.norms, rel=tolerance)
    assert ours.gradients.keys() == theirs.gradients.keys()
    greatest = max(float(gradient.abs().max()) for gradient in theirs.gradients.values())
    for name, gradient in theirs.gradients.items():
        scale = max(float(gradient.abs().max()), 1e-4 * greatest)  # a key's bias has none but rounding
        near = tolerance if case.precision == "fp32" else 5e-2
        assert torch.allclose(ours.gradients[name], gradient, rtol=near, atol=near * scale), name
    assert ours.weights.keys() == theirs.weights.keys()
