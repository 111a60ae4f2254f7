"""The formats of an export as data: who loads them, which models and numbers they take, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.config.workload_block import WorkloadBlock

# the Transformers class that builds a workload's model ("" for a class of the user's own) → the kind of model
KINDS = {
    "AutoModelForCausalLM": "language model",
    "AutoModelForSequenceClassification": "text classifier",
    "AutoModelForTokenClassification": "process reward model",
    "AutoModelForImageClassification": "image classifier",
    "": "own model",
}
LANGUAGE, TEXTS, STEPS, IMAGES, OWN = KINDS.values()
DTYPES = ("fp32", "bf16", "fp16")
# the weights of linear layers in few bits → the package that reads them
ROUNDED = {"int8": "torchao", "fp8": "torchao", "int4": "compressed_tensors", "nf4": "bitsandbytes"}
GGML = ("q8_0", "q5_0", "q4_0")  # weights rounded in blocks of 32, by the package gguf
PACKAGES = {
    "peft": "adapters",
    "torchao": "lowbit",
    "compressed_tensors": "int4",
    "bitsandbytes": "bitsandbytes",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "onnx"),
    **dict.fromkeys(("gguf", "xllamacpp"), "gguf"),
}


@dataclass(frozen=True)
class Format:
    """A format. runtime: the program of drivetrain.export.runtimes that loads it. writer: module:function. packages:
    what writing and loading need beside drivetrain's own. refuses: kind of model → why it has no place there. dtypes,
    quantised: the numbers it can hold, the default first. needs_adapter: whether it holds adapters alone. library: the
    hub's name of the software that loads it, for the card. normalised_positions: of a runtime that shows
    log-probabilities instead of logits, at how many positions of a sample they are compared; None for logits.
    spare_places: places for tokens that the runtime keeps free for an answer. model_types: the types of Transformers'
    models that it holds; empty for all."""

    name: str
    loaded_by: str
    runtime: str
    writer: str
    packages: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("fp32",)
    quantised: tuple[str, ...] = ()
    needs_adapter: bool = False
    takes_shards: bool = False
    library: str | None = None
    normalised_positions: int | None = None
    spare_places: int = 0
    model_types: tuple[str, ...] = ()


_NO_CLASS = "its class is in the user's own file, which plain {} does not read"
FORMATS = {
    each.name: each
    for each in (
        Format(
            "transformers",
            "Transformers",
            "plain_transformers",
            "drivetrain.export.transformers_format:write",
            refuses={OWN: _NO_CLASS.format("Transformers")},
            dtypes=DTYPES,
            quantised=tuple(ROUNDED),
            takes_shards=True,
            library="transformers",
        ),
        Format(
            "peft",
            "PEFT",
            "plain_peft",
            "drivetrain.export.peft_format:write",
            packages=("peft",),
            refuses={OWN: _NO_CLASS.format("PEFT")},
            needs_adapter=True,
            library="peft",
        ),
        Format(
            "onnx",
            "ONNX Runtime",
            "onnx_runtime",
            "drivetrain.export.graph_format:write_onnx",
            packages=("onnx", "onnxscript", "onnxruntime"),
        ),
        Format("torch-export", "torch.export.load", "exported_program", "drivetrain.export.graph_format:write_program"),
        Format(
            "gguf",
            "llama.cpp",
            "llama_cpp",
            "drivetrain.export.gguf_format:write",
            packages=("gguf", "xllamacpp"),
            refuses=dict.fromkeys((TEXTS, STEPS, IMAGES, OWN), "llama.cpp continues texts"),
            dtypes=DTYPES,
            quantised=GGML,
            library="gguf",
            normalised_positions=8,  # each is a request to its server
            spare_places=1,
            model_types=("llama", "mistral", "qwen2", "qwen3", "gpt2"),
        ),
    )
}
# named by users, and written by none of ours → what to do
ELSEWHERE = {
    "gptq": "give int4, which rounds without data; or its library, gptqmodel, which comes as source for GPUs: export "
    "--to transformers, and run gptqmodel on that folder in an environment of its own",
    "awq": "give int4, which rounds without data; or llm-compressor, which pins an older Transformers: export --to "
    "transformers, and run it on that folder in an environment of its own",
    **dict.fromkeys(
        ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k"),
        "llama.cpp's own tool makes it: export --to gguf --dtype fp16, and run llama-quantize on model.gguf",
    ),
}


def kind_of(workload: WorkloadBlock) -> str:
    return KINDS[workload.auto_class]


def matrix() -> dict[str, dict[str, str]]:
    """Returns kind of model → format → "" where it can be exported, or why not."""
    return {kind: {name: each.refuses.get(kind, "") for name, each in FORMATS.items()} for kind in KINDS.values()}
