"""A base quantised while it is loaded is, to the bit, the one that is loaded whole and then quantised."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from drivetrain.config.adapter import Adapter
from drivetrain.config.quantised import QuantisedBase
from drivetrain.errors import UserError
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.quantised_linear import QuantisedLinear
from drivetrain.models.transformers_classifiers import build_classifier

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
pytest.importorskip("peft")

WIDTH, BLOCKS = 128, 2
FORMATS = {
    "nf4": QuantisedBase(format="nf4"),
    "int8": QuantisedBase(format="int8"),
    "int4": QuantisedBase(format="int4", group_size=32),
    "int8-torchao": QuantisedBase(format="int8-torchao"),
}


def language_model(folder: Path, tied: bool = True, blocks: int = BLOCKS) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def classifier(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def built(
    folder: Path, config: QuantisedBase, kind: str = "AutoModelForCausalLM", labels: Any = (), streams: bool = True
) -> tuple[nn.Module, AdapterSet, list[str]]:
    """With LoRA, and what was warned of."""
    adapters, words = AdapterSet([Adapter(rank=4)], str(folder), config), list[str]()
    if not streams:
        adapters.streaming = lambda: None  # type: ignore[method-assign]
    torch.manual_seed(1)
    given = adapters if streams else None
    model = build_classifier(kind, str(folder), None, labels, "workload.model", words.append, adapters=given)
    torch.manual_seed(2)
    return adapters.fit(model), adapters, words


def check_same(one: tuple[nn.Module, AdapterSet, list[str]], other: tuple[nn.Module, AdapterSet, list[str]]) -> None:
    first, second = ({**dict(each[0].named_parameters()), **dict(each[0].named_buffers())} for each in (one, other))
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name
        assert tensor.requires_grad == second[name].requires_grad, name
    assert one[1]._origin == other[1]._origin
    assert one[2] == other[2]
    configs = [each[0].config.to_dict() for each in (one, other)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_is_the_one_that_is_quantised_whole(tmp_path: Path, config: QuantisedBase, tied: bool) -> None:
    folder = language_model(tmp_path, tied)
    streamed = built(folder, config)
    assert sum(isinstance(module, QuantisedLinear) for module in streamed[0].modules()) == 7 * BLOCKS
    check_same(streamed, built(folder, config, streams=False))


def test_a_classifier_whose_head_starts_at_random_is_the_one_that_is_quantised_whole(tmp_path: Path) -> None:
    given = classifier(tmp_path), FORMATS["nf4"], "AutoModelForSequenceClassification", ["no", "yes"]
    check_same(built(*given), built(*given, streams=False))


def test_the_base_is_never_there_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes allocated at the peak of loading, beside what the linear weights alone take in fp32. The file, of half as
    many, is mapped in both ways, which the profiler counts too."""
    blocks = 24
    folder = language_model(tmp_path, blocks=blocks)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what threads allocate is not seen
    only_cpu = [torch.profiler.ProfilerActivity.CPU]

    def peak(streams: bool) -> int:
        with torch.profiler.profile(activities=only_cpu, profile_memory=True, acc_events=True) as profile:
            model, *_ = built(folder, FORMATS["int8"], streams=streams)
        del model
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))

    linear = 4 * blocks * 15 * WIDTH * WIDTH
    assert peak(streams=False) > 1.5 * linear
    assert peak(streams=True) < linear


@pytest.mark.parametrize("fault", ["missing", "shape", "not finite"])
def test_weights_that_cannot_be_quantised_are_explained_as_of_a_base_loaded_whole(tmp_path: Path, fault: str) -> None:
    folder = language_model(tmp_path)
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    weights[name] = {"missing": weights[name], "shape": weights[name][1:], "not finite": weights[name] / 0}[fault]
    if fault == "missing":
        del weights[name]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError) as streamed:
        built(folder, FORMATS["nf4"])
    with pytest.raises(UserError) as whole:
        built(folder, FORMATS["nf4"], streams=False)
    assert str(streamed.value) == str(whole.value)
    assert "up_proj" in str(whole.value)
