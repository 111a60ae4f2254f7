"""Defines what a stranger's folder may hold: code and pickles that write a file when they run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIGURATION = """
{mark}
from transformers import PretrainedConfig


class NetConfig(PretrainedConfig):
    model_type = "strangers-net"

    def __init__(self, vocab_size=300, hidden_size=8, **other):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**other)
"""
MODELING = """
{mark}
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_net import NetConfig


class Net(PreTrainedModel):
    config_class = NetConfig
    base_model_prefix = "net"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None, **other):
        return CausalLMOutput(logits=self.head(self.embed(input_ids)))
"""
TOKENIZATION = """
{mark}
from transformers import PreTrainedTokenizerFast


class NetTokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL_MAP = {"AutoConfig": "configuration_net.NetConfig", "AutoModelForCausalLM": "modeling_net.Net"}
TOKENIZER_MAP = [None, "tokenization_net.NetTokenizer"]


class Evil:
    """A pickle that makes a folder when it is read without restraint."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._marker,)


def marking(marker: Path) -> str:
    """Python source that writes the marker."""
    return f"import pathlib; pathlib.Path({str(marker)!r}).touch()"


def model_with_code(folder: Path, marker: Path) -> Path:
    """A whole causal language model whose classes lie beside its weights."""
    folder.mkdir(parents=True)
    (folder / "configuration_net.py").write_text(CONFIGURATION.format(mark=marking(marker)))
    (folder / "modeling_net.py").write_text(MODELING.format(mark=marking(marker)))
    config = {"model_type": "strangers-net", "vocab_size": 300, "hidden_size": 8, "auto_map": MODEL_MAP}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(300, 8, generator=generator) for name in ("embed.weight", "head.weight")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def tokenizer_with_code(folder: Path, marker: Path) -> Path:
    """A byte tokenizer whose class lies beside it."""
    from drivetrain.data.language.vocabularies import byte_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(["<|endoftext|>"]).save_pretrained(folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described |= {"tokenizer_class": "NetTokenizer", "auto_map": {"AutoTokenizer": TOKENIZER_MAP}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "tokenization_net.py").write_text(TOKENIZATION.format(mark=marking(marker)))
    return folder
