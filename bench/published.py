"""Compares planned rates of training with published ones, on machines that are not here.

    python bench/published.py            # writes bench/results/published.md

Each model is built without numbers (fake tensors), one forward and backward pass of the published batch is traced, and
the exchanges that the published engine makes are added. What plan/step_time.py makes of it stands beside the figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.machines import cluster
from drivetrain.plan.speeds import FUSED, speeds_of
from drivetrain.plan.step_costs import Messages, Operations, StepCosts, StepMemory
from drivetrain.plan.step_time import Circumstances, StepTime, step_time
from drivetrain.plan.trace_operations import OperationRecord

RESULTS = Path(__file__).with_name("results") / "published.md"
HEAD = """# Planned and published rates of training

Made by `python bench/published.py`. Rates are of one device, a second. Planned ones come from plan/step_time.py with
the catalogue's figures; no such device was here. A constant was fitted to each row marked so, and the others test it.

| what | machine | unit | planned | published | error | bound by | |
|---|---|---|--:|--:|--:|---|---|"""
TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TRAINY = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
LAMBDA = "https://github.com/lambdal/deeplearning-benchmark/blob/master/pytorch/pytorch-train-throughput-fp16.csv"
NVIDIA = "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5"
TIMM = (
    "https://github.com/huggingface/pytorch-image-models/blob/main/results/"
    "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
)
ADAMW_BYTES = 28  # of parameter, gradient and two moments in fp32: four are read, three written


@dataclass(frozen=True)
class Case:
    """A published figure, and what is needed to plan it."""

    what: str
    machine: str
    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    counted: int  # tokens, pictures or sequences of one device in a step
    unit: str
    published: float  # of one device, a second
    source: str
    precision: str = "mixed"  # "mixed": autocast; "bf16": weights in bf16; "fp8": bf16, products of blocks in float8
    recompute: str = "no"  # "no", "selective" (every second product, no attention), "full"
    shards: int = 1  # FSDP ranks
    tensor: int = 1  # tensor-parallel ranks
    compiled: bool = False
    causal: bool = False
    dtype: str = "bfloat16"
    fitted: bool = False  # a constant of the time model was fitted to it


# --- models ---


def llama(layers: int, hidden: int, inner: int, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, **sizes
    )
    config.use_cache = False
    return LlamaForCausalLM(config)


def gpt(layers: int, hidden: int, length: int) -> nn.Module:
    """A decoder of MPT's sizes: products with biases, GELU, four times as wide within, learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes = {"vocab_size": 50368, "n_positions": length, "n_embd": hidden, "n_layer": layers, "n_head": hidden // 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig()
    config._attn_implementation = "eager"  # as NVIDIA's script computes it
    return BertForQuestionAnswering(config)


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.initialization import no_init_weights

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = ViTConfig(num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    config._attn_implementation = "eager"  # timm's of that time
    with no_init_weights():  # which draws again where a number is too large: fake tensors have none
        return ViTForImageClassification(config)


def tokens(rows: int, length: int) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.zeros(rows, length, dtype=torch.long) for name in ("input_ids", "labels")}


def questions(rows: int) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        ends = {name: torch.zeros(rows, dtype=torch.long) for name in ("start_positions", "end_positions")}
        return {"input_ids": torch.zeros(rows, 384, dtype=torch.long), **ends}

    return made


def pictures(rows: int) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        pixels = torch.zeros(rows, 3, 224, 224)
        return {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.long)}

    return made


def llama8() -> nn.Module:
    return llama(32, 4096, 14336, 32)


def llama70() -> nn.Module:
    return llama(80, 8192, 28672, 64)


def mpt(size: str, length: int) -> Callable[[], nn.Module]:
    layers, hidden = {"1b": (24, 2048), "7b": (32, 4096), "13b": (40, 5120), "30b": (48, 7168), "70b": (80, 8192)}[size]
    return lambda: gpt(layers, hidden, length)


def titan(what: str, machine: str, published: float, **more: Any) -> Case:
    given = {"precision": "bf16", "recompute": "selective", "source": TITAN, **more}
    return Case(what, machine, llama8, tokens(2, 8192), 16384, "tokens", published, causal=True, **given)


def foundry(
    size: str, machine: str, rows: int, published: float, shards: int, recompute: str = "no", fitted: bool = False
) -> Case:
    return Case(
        f"MPT {size}, 2,048 tokens", machine, mpt(size, 2048), tokens(rows, 2048), rows * 2048, "tokens", published,
        FOUNDRY, precision="bf16", recompute=recompute, shards=shards, causal=True, fitted=fitted,
    )  # fmt: skip


def squad(machine: str, rows: int, published: float) -> Case:
    name = f"BERT-base, SQuAD, 384 tokens, batch {rows}"
    return Case(
        name, machine, bert, questions(rows), rows, "sequences", published, LAMBDA,
        dtype="float16",
    )  # fmt: skip


def residual(machine: str, rows: int, published: float, source: str, fitted: bool = False) -> Case:
    return Case(
        f"ResNet-50, batch {rows}", machine, resnet, pictures(rows), rows, "pictures", published, source,
        dtype="float16", fitted=fitted,
    )  # fmt: skip


H100 = "H100-96GB-500W"
CASES = [
    titan("Llama 3.1 8B, FSDP", f"8x{H100}", 5762, shards=8),
    titan("Llama 3.1 8B, FSDP, compiled", f"8x{H100}", 6667, shards=8, compiled=True, fitted=True),
    titan("Llama 3.1 8B, FSDP, compiled, float8", f"8x{H100}", 8532, shards=8, compiled=True, precision="fp8"),
    titan("Llama 3.1 8B, FSDP", f"16x8x{H100}", 5605, shards=128),
    titan("Llama 3.1 8B, FSDP, compiled", f"16x8x{H100}", 6514, shards=128, compiled=True),
    titan(
        "Llama 3.1 8B, FSDP, compiled, float8", "4x8xH200-141GB", 10938, shards=32, compiled=True, precision="fp8",
        source=TRAINY,
    ),
    Case(
        "Llama 3.1 70B, FSDP 32 x TP 8, compiled, float8", f"32x8x{H100}", llama70, tokens(16, 8192), 16 * 8192 // 8,
        "tokens", 829, TITAN, precision="fp8", recompute="full", shards=32, tensor=8, compiled=True, causal=True,
    ),
    foundry("7b", "8xA100-80GB", 6, 4641, 8, fitted=True),
    foundry("7b", "8xH100-80GB", 6, 10643, 8),
    foundry("13b", "8xA100-80GB", 2, 2262, 8),
    foundry("13b", "8x8xH100-80GB", 2, 4800, 64, fitted=True),
    foundry("30b", "8xA100-80GB", 3, 916, 8, "full"),
    foundry("30b", "2x8xH100-80GB", 10, 2263, 16, "full"),
    foundry("70b", "8x8xA100-80GB@roce-200", 8, 410, 64, "full"),
    foundry("70b", "8x8xH100-80GB", 8, 1039, 64, "full"),
    squad("1xV100-16GB", 48, 189),
    squad("1xRTX-3090", 96, 172),
    squad("1xRTX-4090", 96, 297),
    squad("1xA6000", 192, 198),
    squad("1xA100-80GB", 320, 443),
    squad("1xH100-80GB", 320, 870),
    residual("1xA100-80GB", 256, 2470, NVIDIA, fitted=True),
    residual("1xV100-16GB", 256, 1200, NVIDIA),
    residual("1xRTX-3090", 512, 1218, TIMM),
    Case(
        "ViT-L/16, batch 64", "1xRTX-3090", vit, pictures(64), 64, "pictures", 117.2, TIMM,
        dtype="float16",
    ),
]  # fmt: skip


# --- costs ---


@cache
def traced(
    model: Callable[[], nn.Module], batch: Callable[[], dict[str, Any]], mixed: bool, dtype: str, recomputes: bool
) -> tuple[tuple[Operations, ...], int]:
    """Returns the operations of a forward and a backward pass, and the number of parameters."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.float32 if mixed else torch.bfloat16)
        try:
            built = model().train()
        finally:
            torch.set_default_dtype(torch.float32)
        if recomputes:
            built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        given = batch()
        with OperationRecord() as seen:
            with torch.autocast("cpu", getattr(torch, dtype), enabled=mixed):
                loss = built(**given).loss
            loss.backward()
    if seen.failure is not None:
        raise seen.failure
    return seen.operations(), sum(parameter.numel() for parameter in built.parameters())


def costs_of(case: Case) -> StepCosts:
    mixed = case.precision == "mixed"
    operations, parameters = traced(case.model, case.batch, mixed, case.dtype, case.recompute == "full")
    if case.recompute == "selective":
        again, _ = traced(case.model, case.batch, mixed, case.dtype, True)
        operations = selective(operations, again)
    if case.precision == "fp8":
        operations = tuple(replace(each, dtype="float8") if each.kind == "matmul" else each for each in operations)
    if case.tensor > 1:
        operations = tuple(divided(each, case.tensor) for each in operations)
    own = parameters / case.shards / case.tensor
    update = Operations("optimizer", "float32", 40, 0.0, own * ADAMW_BYTES)
    if case.shards > 1:
        operations = (*operations, *copies(parameters / case.tensor))
    memory = StepMemory(0, 0, {})
    return StepCosts(
        memory, (*operations, update), exchanges(case, parameters), parameters, case.counted, "derived", 0.0
    )


def copies(parameters: float) -> tuple[Operations, ...]:
    """Returns what FSDP copies in memory: gathered weights out of their buffer for both passes, and gradients, cast to
    fp32, into one."""
    gathered = Operations("memory", "bfloat16", 160, 0.0, 2 * 4 * parameters)
    reduced = Operations("memory", "float32", 160, 0.0, (2 + 4 + 4 + 4) * parameters)
    return gathered, reduced


def selective(once: tuple[Operations, ...], again: tuple[Operations, ...]) -> tuple[Operations, ...]:
    """Returns the operations where every second product is kept, attention too, and all else is computed again."""
    share = {"matmul": 0.5, "attention": 0.0}
    more = []
    by_kind = {(each.kind, each.dtype) for each in again}
    for kind, dtype in sorted(by_kind):
        twice = total(again, kind, dtype)
        single = total(once, kind, dtype)
        kept = share.get(kind, 1.0)
        more.append(
            Operations(
                kind,  # type: ignore[arg-type]
                dtype,
                max(1, round(kept * (twice[0] - single[0]))),
                kept * (twice[1] - single[1]),
                kept * (twice[2] - single[2]),
            )
        )
    return (*once, *more)


def total(operations: tuple[Operations, ...], kind: str, dtype: str) -> tuple[int, float, float]:
    found = [each for each in operations if (each.kind, each.dtype) == (kind, dtype)]
    return sum(e.calls for e in found), sum(e.flops for e in found), sum(e.bytes for e in found)


def divided(operations: Operations, ranks: int) -> Operations:
    return replace(operations, flops=operations.flops / ranks, bytes=operations.bytes / ranks)


def exchanges(case: Case, parameters: int) -> tuple[Messages, ...]:
    """Returns what FSDP and tensor parallel exchange: weights in bf16 gathered for each pass, gradients scattered in
    fp32; with tensor parallel, a gather and a scatter of the activations around each half of a block, in every pass."""
    found = []
    if case.shards > 1:
        blocks, stride, held = 80, case.tensor, parameters / case.tensor
        found.append(Messages("all_gather", "shard", case.shards, stride, 2 * blocks, 2 * 2.0 * held))
        found.append(Messages("reduce_scatter", "shard", case.shards, stride, blocks, 4.0 * held))
    if case.tensor > 1:
        passes = 4 if case.recompute == "full" else 3
        calls = 80 * 2 * passes
        whole = 2.0 * case.counted * case.tensor * 8192
        found.append(Messages("all_gather", "tp", case.tensor, 1, calls, calls * whole))
        found.append(Messages("reduce_scatter", "tp", case.tensor, 1, calls, calls * whole))
    return tuple(found)


# --- table ---


def planned(case: Case) -> StepTime:
    known = catalogue(Path(__file__).with_name("published_devices.yaml"))
    machine = cluster(case.machine, known)
    given = Circumstances(
        causal=case.causal,
        recomputes=case.recompute == "full",
        fused=FUSED if case.compiled else 1.0,
        dtype="float8" if case.precision == "fp8" else case.dtype,
    )
    return step_time(costs_of(case), speeds_of(machine, machine.devices), given)


def main() -> None:
    lines, errors = [HEAD], []
    for case in CASES:
        time = planned(case)
        rate = case.counted / time.seconds
        error = rate / case.published - 1
        if not case.fitted:
            errors.append(abs(error))
        mark = " (fitted)" if case.fitted else ""
        cells = (
            case.what + mark,
            case.machine,
            case.unit,
            f"{rate:,.0f}",
            f"{case.published:,.0f}",
            f"{error:+.0%}",
            time.bound_by,
            f"[source]({case.source})",
        )
        lines.append(f"| {' | '.join(cells)} |")
        print(*cells[:-1], sep=" | ", flush=True)
    found = f"Rows that nothing was fitted to: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}."
    RESULTS.write_text("\n".join([*lines, "", found, ""]))
    print(found)


if __name__ == "__main__":
    main()
