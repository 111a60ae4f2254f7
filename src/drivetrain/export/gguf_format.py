"""Writes model.gguf, which llama.cpp and what stands on it load, and a Modelfile for Ollama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drivetrain.export.gguf_architectures import architecture_of, tensors_of, write_settings
from drivetrain.export.gguf_vocabulary import write_vocabulary
from drivetrain.export.source import Source
from drivetrain.export.written import Written
from drivetrain.workloads.exporting import Speaks

MODEL, MODELFILE = "model.gguf", "Modelfile"
KINDS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q5_0": "Q5_0", "q4_0": "Q4_0"}
FILE_TYPES = {
    "fp32": "ALL_F32",
    "fp16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q5_0": "MOSTLY_Q5_0",
    "q4_0": "MOSTLY_Q4_0",
}
ENDS_OF_MODEL = ("token_embd.weight", "output.weight")  # few bits cost most there: they keep 8
BLOCK = 32  # numbers that share a scale
UNKNOWN = (
    "llama.cpp reads several characters in a row that the tokenizer does not know as one token, the run as several"
)


def write(model: nn.Module, source: Source, into: Path) -> Written:
    """Writes the model's weights, tokenizer and chat template as one file, a tensor at a time. Raises UserError for a
    model or a tokenizer that llama.cpp would compute in another way."""
    import gguf

    assert isinstance(source.workload, Speaks)
    numbers = source.request.numbers
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    writer = gguf.GGUFWriter(into / MODEL, architecture_of(config).name)
    writer.add_name(source.run.name)
    writer.add_file_type(int(gguf.LlamaFileType[FILE_TYPES[numbers]]))
    write_settings(config, writer)
    unknown = write_vocabulary(source.workload.tokenizer, config.vocab_size, source.workload.ends, writer)
    if unknown is not None:
        source.notes.append(UNKNOWN)
    kept = [
        (name, tensor, gguf.GGMLQuantizationType[_kind(name, tensor, numbers)])
        for name, tensor in tensors_of(model, config)
    ]
    for name, tensor, kind in kept:
        _announce(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor, kind in kept:
        writer.write_tensor_data(gguf.quants.quantize(tensor.float().contiguous().numpy(), kind))
    writer.close()
    (into / MODELFILE).write_text(_modelfile(source, config), encoding="utf-8")
    return Written(asked={"vocabulary": config.vocab_size}, script=SCRIPT, unknown=unknown)


def _kind(name: str, tensor: Tensor, numbers: str) -> str:
    """Returns GGML's name of the numbers that a tensor is kept in."""
    if tensor.dim() < 2 or name.startswith("position_embd"):
        return "F32"
    if not numbers.startswith("q"):
        return KINDS[numbers]
    if tensor.shape[-1] % BLOCK:
        return "F16"
    return "Q8_0" if name in ENDS_OF_MODEL else KINDS[numbers]


def _announce(writer: Any, name: str, tensor: Tensor, kind: Any) -> None:
    """Adds what the header says of a tensor: its shape, or that of its rows' bytes where they are blocks."""
    import gguf
    import numpy

    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = tensor.numel() // block * size
    plain = {gguf.GGMLQuantizationType.F32: numpy.float32, gguf.GGMLQuantizationType.F16: numpy.float16}
    if kind in plain:
        writer.add_tensor_info(name, tuple(tensor.shape), numpy.dtype(plain[kind]), count)
    else:
        rows = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
        writer.add_tensor_info(name, rows, numpy.dtype(numpy.uint8), count, raw_dtype=kind)


def _modelfile(source: Source, config: Any) -> str:
    """Returns what `ollama create` reads. Ollama takes the chat template from model.gguf where it knows it."""
    assert isinstance(source.workload, Speaks)
    tokens = source.workload.tokenizer.convert_ids_to_tokens(sorted(source.workload.ends))
    lines = [f"FROM ./{MODEL}", f"PARAMETER num_ctx {config.max_position_embeddings}"]
    return "\n".join([*lines, *(f'PARAMETER stop "{token}"' for token in tokens)]) + "\n"


SCRIPT = """import xllamacpp

settings = xllamacpp.CommonParams()
settings.model.path = "model.gguf"
server = xllamacpp.Server(settings)
answer = server.handle_completions({"prompt": "Hello", "max_tokens": 32, "temperature": 0})
print(answer["choices"][0]["text"])
"""
