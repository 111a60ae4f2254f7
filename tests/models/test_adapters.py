"""Adapters within a model and as files, against plain PEFT."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from drivetrain.config.adapter import Adapter
from drivetrain.errors import UserError
from drivetrain.models.adapters import KEPT, AdapterSet
from drivetrain.models.transformers_classifiers import build_classifier
from tests.tiny_language import LLAMA

SIZES = {key: value for key, value in LLAMA.items() if key != "model_type"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True, "alpha": 3.0, "targets": ["q_proj", "down_proj"]},
    "dora": {"dora": True},
    "pissa": {"pissa": True, "rank": 4},
    "pissa, rank-stabilised": {"pissa": True, "rank": 4, "rslora": True},
    "embeddings too": {"targets": ["embed_tokens", "v_proj"]},
    "head trained whole": {"train_also": ["lm_head"]},
    "oft": {"method": "oft", "block_size": 16},
    "oft of some": {"method": "oft", "block_size": 8, "targets": ["q_proj", "v_proj"]},
    "ia3": {"method": "ia3"},
    "prompt": {"method": "prompt", "virtual_tokens": 6},
    "prefix": {"method": "prefix", "virtual_tokens": 6},
    "prefix, encoded": {"method": "prefix", "virtual_tokens": 6, "hidden_size": 12},
    "p-tuning": {"method": "p-tuning", "virtual_tokens": 6, "hidden_size": 12},
}
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's folder."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=40, **SIZES)).save_pretrained(folder)
    return folder


def adapters(base: Path | None, *blocks: dict[str, Any]) -> AdapterSet:
    return AdapterSet([Adapter.model_validate(block) for block in blocks], None if base is None else str(base))


def moved(model: nn.Module) -> nn.Module:
    """As training would: every trained weight somewhere else."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def plain(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base).eval()


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in METHODS.items()])
def test_what_is_written_gives_plain_peft_the_same_logits(block: dict[str, Any], base: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    ours = adapters(base, block)
    model = moved(ours.fit(plain(base)))
    ours.write(model, trained(model), tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain(base), str(tmp_path)).eval()
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in METHODS.items()])
def test_a_checkpoint_of_an_adapter_holds_what_is_trained_and_nothing_else(block: dict[str, Any], base: Path) -> None:
    model = adapters(base, block).fit(plain(base))
    assert getattr(model, KEPT) == trained(model).keys()
    assert sum(t.numel() for t in trained(model).values()) < 0.5 * sum(p.numel() for p in plain(base).parameters())
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert sum(p.numel() for p in frozen.values()) >= sum(
        p.numel() for name, p in plain(base).named_parameters() if name != "lm_head.weight"
    )


@pytest.mark.parametrize(
    "kind", [{}, {"method": "oft", "block_size": 16}, {"method": "ia3"}, {"method": "prompt", "virtual_tokens": 3}]
)
def test_a_classifier_learns_its_head_too_and_plain_peft_loads_both(kind: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=48, num_labels=3)).save_pretrained(tmp_path)
    load = AutoModelForSequenceClassification.from_pretrained
    ours = adapters(tmp_path, kind)
    model = moved(ours.fit(load(tmp_path).eval()))
    assert any("classifier" in name for name in trained(model))
    ours.write(model, trained(model), tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load(tmp_path), str(tmp_path / "adapter")).eval()
    mask = torch.ones_like(IDS)
    torch.testing.assert_close(
        model(input_ids=IDS, attention_mask=mask).logits, theirs(input_ids=IDS, attention_mask=mask).logits
    )


def test_convolutions_take_lora_where_they_are_named(tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic")
    with pytest.raises(UserError, match="no linear layer beside its head"):
        adapters(None, {}).fit(ResNetForImageClassification(config))
    base = ResNetForImageClassification(config)
    base.save_pretrained(tmp_path)
    ours = adapters(tmp_path, {"targets": ["convolution"]})
    model = ours.fit(base)
    assert {"classifier.1.weight", "classifier.1.bias"} < trained(model).keys()
    pictures = torch.randn(2, 3, 32, 32)
    model.train()(pixel_values=pictures)  # would move the statistics of its normalisation
    ours.write(moved(model), trained(model), tmp_path / "adapter")
    load = ResNetForImageClassification.from_pretrained
    theirs = peft.PeftModel.from_pretrained(load(tmp_path), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(model(pixel_values=pictures).logits, theirs(pixel_values=pictures).logits)


def test_what_is_trained_whole_normalises_as_in_training(tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic")
    base = ResNetForImageClassification(config)
    base.save_pretrained(tmp_path)
    ours = adapters(tmp_path, {"targets": ["stages.1.layers.0.layer.0.convolution"], "train_also": ["embedder"]})
    model = ours.fit(base)
    model.train()(pixel_values=torch.randn(2, 3, 32, 32))
    kept = {name: tensor for name, tensor in model.state_dict().items() if name in getattr(model, KEPT)}
    assert any(name.endswith("running_mean") for name in kept)
    ours.write(model.eval(), kept, tmp_path / "adapter")
    load = ResNetForImageClassification.from_pretrained
    theirs = peft.PeftModel.from_pretrained(load(tmp_path), str(tmp_path / "adapter")).eval()
    pictures = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(pixel_values=pictures).logits, theirs(pixel_values=pictures).logits)


def test_several_adapters_add_up_as_in_plain_peft(base: Path, tmp_path: Path) -> None:
    blocks = [{"name": "one", "rank": 2}, {"name": "two", "rank": 4, "targets": ["q_proj"]}]
    ours = adapters(base, *blocks)
    model = moved(ours.fit(plain(base)))
    ours.write(model, trained(model), tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain(base), str(tmp_path / "one"), adapter_name="one")
    theirs.load_adapter(str(tmp_path / "two"), "two")
    theirs.base_model.set_adapter(["one", "two"])
    torch.testing.assert_close(logits(model), logits(theirs.eval()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in METHODS.items()])
def test_training_goes_on_from_a_saved_adapter(block: dict[str, Any], base: Path, tmp_path: Path) -> None:
    first = adapters(base, block)
    model = moved(first.fit(plain(base)))
    first.write(model, trained(model), tmp_path)
    again = adapters(base, {"path": tmp_path}).fit(plain(base)).eval()
    assert trained(again)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-5)


def test_a_new_adapter_stands_on_a_saved_one_that_stays_as_it_is(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    saved = peft.get_peft_model(plain(base), config).eval()
    saved.save_pretrained(str(tmp_path))
    below = {"name": "below", "path": tmp_path, "trained": False}
    ours = adapters(base, below, {"name": "new", "rank": 2})
    model = ours.fit(plain(base)).eval()
    torch.testing.assert_close(logits(model), logits(saved), rtol=1e-4, atol=1e-5)
    assert trained(model)
    assert all(".new." in name for name in trained(model))
    ours.write(model, trained(model), tmp_path / "both")
    assert (tmp_path / "both" / "below" / "adapter_model.safetensors").is_file()


def test_a_classifier_of_plain_peft_goes_on(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=48, num_labels=3)).save_pretrained(tmp_path)
    load = AutoModelForSequenceClassification.from_pretrained
    config = peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS", init_lora_weights=False)
    theirs = peft.get_peft_model(load(tmp_path), config).eval()
    theirs.save_pretrained(str(tmp_path / "saved"))
    model = adapters(tmp_path, {"path": tmp_path / "saved"}).fit(load(tmp_path)).eval()
    mask = torch.ones_like(IDS)
    torch.testing.assert_close(
        model(input_ids=IDS, attention_mask=mask).logits, theirs(input_ids=IDS, attention_mask=mask).logits
    )
    bare = adapters(tmp_path, {"train_also": []})
    without = bare.fit(load(tmp_path))
    bare.write(without, trained(without), tmp_path / "bare")
    peft.PeftModel.from_pretrained(load(tmp_path), str(tmp_path / "bare"))


def test_a_head_below_stays_as_it_is(base: Path, tmp_path: Path) -> None:
    saved = saved_adapter(base, tmp_path, train_also=["lm_head"])
    model = adapters(base, {"name": "old", "path": saved, "trained": False}, {"name": "new"}).fit(plain(base))
    assert not any("lm_head" in name for name in trained(model))
    assert not torch.equal(model.lm_head.weight, plain(base).lm_head.weight)


def test_a_saved_adapter_that_is_gone_by_the_time_of_a_checkpoint_is_reported(base: Path, tmp_path: Path) -> None:
    saved = saved_adapter(base, tmp_path)
    below = adapters(base, {"name": "old", "path": saved, "trained": False}, {"name": "new"})
    model = below.fit(plain(base))
    below.write(model, trained(model), tmp_path / "whole")
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model.safetensors is gone from the adapter"):
        below.write(model, trained(model), tmp_path / "lacking")


def test_a_tied_weight_is_not_trained_whole() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=True, **SIZES))
    with pytest.raises(UserError, match=r"embed_tokens.weight is the same weight"):
        adapters(None, {"train_also": ["lm_head"]}).fit(model)


def test_saved_adapters_of_other_kinds_do_not_go_together(base: Path, tmp_path: Path) -> None:
    prompt = saved_adapter(base, tmp_path, method="prompt", virtual_tokens=4)
    with pytest.raises(UserError, match="do not go together: LORA, PROMPT_TUNING"):
        adapters(base, {"name": "old", "path": prompt, "trained": False}, {"name": "new"})


@pytest.mark.parametrize("content", ["{}", "[]", "{", "\udcff"])
def test_a_broken_note_of_the_base_is_as_none(content: str, base: Path, tmp_path: Path) -> None:
    saved = saved_adapter(base, tmp_path)
    (saved / "adapter_base.json").write_text(content, errors="surrogateescape")
    adapters(base, {"path": saved}).fit(plain(base))
    (saved / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"of no kind|PEFT cannot read"):
        adapters(base, {"path": saved})


def test_linear_layers_whose_names_end_other_modules_names_are_distinguished(tmp_path: Path) -> None:
    """Of Sequentials in each other: 0 is a layer, 1.0 none, 1.0.0 is one again."""

    def build() -> Any:
        torch.manual_seed(2)
        inner = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 8))
        return nn.Sequential(nn.Linear(8, 8), inner)

    ours = adapters(None, {"rank": 2})
    model = moved(ours.fit(build()))
    assert {name.partition(".lora_")[0] for name in trained(model)} == {"0", "1.0.0", "1.1"}
    ours.write(model, trained(model), tmp_path)
    theirs = peft.PeftModel.from_pretrained(build(), str(tmp_path)).eval()
    x = torch.randn(5, 8)
    torch.testing.assert_close(model(x), theirs(x))


def test_a_target_that_does_not_exist_is_answered_with_the_nearest(base: Path) -> None:
    with pytest.raises(UserError) as words:
        adapters(base, {"targets": ["q_porj", "gate", "v_proj"]}).fit(plain(base))
    first, second = words.value.problems
    assert first.field == "adapter.targets"
    assert "has no module q_porj" in first.why
    assert "q_proj" in first.fix
    assert "gate_proj" in second.fix


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"targets": ["lm_head"], "train_also": ["lm_head"]}, "trained whole and have an adapter"),
        ({"train_also": ["lm_haed"]}, "has no module lm_haed"),
        ({"targets": ["mlp"]}, "PEFT cannot put it into LlamaForCausalLM: a LlamaMLP is not supported"),
        ({"pissa": True, "targets": ["embed_tokens", "q_proj"]}, "it starts from linear layers"),
        ({"pissa": True, "rank": 1000}, "1000 > the smaller side of model.layers.0.self_attn.q_proj"),
        ({"method": "ia3", "targets": ["q_proj"], "feedforward": ["up_proj"]}, "up_proj are no targets"),
        ({"name": "layers"}, "has modules called layers"),
        ({"method": "ia3", "targets": "all-linear"}, "and needs their names"),
        ({"method": "oft", "block_size": 48}, "48 does not divide the .* inputs of .*_proj.* other layers"),
        ({"method": "oft", "block_size": 4, "targets": ["embed_tokens"]}, "embed_tokens is no linear layer"),
    ],
)
def test_modules_that_do_not_go_together_are_refused(block: dict[str, Any], words: str, base: Path) -> None:
    with pytest.raises(UserError, match=words):
        adapters(base, block).fit(plain(base))


def test_prompts_are_refused_for_pictures() -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=3)
    with pytest.raises(UserError, match="of language models and text classifiers"):
        adapters(None, {"method": "prompt"}).fit(ResNetForImageClassification(config))


def saved_adapter(base: Path, folder: Path, **block: Any) -> Path:
    ours = adapters(base, block)
    model = moved(ours.fit(plain(base)))
    ours.write(model, trained(model), folder)
    return folder


def test_an_adapter_of_another_base_is_refused_by_its_weights(base: Path, tmp_path: Path) -> None:
    saved = saved_adapter(base, tmp_path)
    torch.manual_seed(1)
    other = LlamaForCausalLM(LlamaConfig(vocab_size=40, **SIZES))
    with pytest.raises(UserError, match="whose weights are other ones"):
        adapters(base, {"path": saved}).fit(other)


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
def test_an_adapter_of_another_architecture_is_refused_by_its_shapes(
    change: dict[str, int], base: Path, tmp_path: Path
) -> None:
    saved = saved_adapter(base, tmp_path)
    (saved / "adapter_base.json").unlink()  # as plain PEFT leaves it
    with pytest.raises(UserError, match="is of another model") as words:
        adapters(base, {"path": saved}).fit(LlamaForCausalLM(LlamaConfig(vocab_size=40, **{**SIZES, **change})))
    assert str(base) in words.value.problems[0].fix


def test_a_file_that_was_cut_short_is_reported(base: Path, tmp_path: Path) -> None:
    saved = saved_adapter(base, tmp_path)
    file = saved / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="broken file, perhaps cut short"):
        adapters(base, {"path": saved})
    file.unlink()
    with pytest.raises(UserError, match="holds no adapter_model"):
        adapters(base, {"path": saved})
    (saved / "adapter_config.json").write_text('{"peft_type": "LO')
    file.write_bytes(b"")
    with pytest.raises(UserError, match="broken file"):
        adapters(base, {"path": saved})


def test_a_file_of_an_unknown_kind_of_adapter_is_reported(base: Path, tmp_path: Path) -> None:
    saved = saved_adapter(base, tmp_path)
    config = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "MAGIC"}))
    with pytest.raises(UserError, match="PEFT cannot read"):
        adapters(base, {"path": saved})


def with_config(saved: Path, **changes: Any) -> Path:
    config = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return saved


def test_an_adapter_that_trains_the_bases_biases_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trains the base's biases"):
        adapters(base, {"path": with_config(saved_adapter(base, tmp_path), bias="all")})


def test_numbers_of_an_adapter_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    saved = saved_adapter(base, tmp_path)
    tensors = load_file(saved / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] * math.nan}, saved / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="has numbers that are not finite"):
        adapters(base, {"path": saved})


def test_modules_that_peft_saves_whole_are_matched_as_peft_matches_them(base: Path, tmp_path: Path) -> None:
    """By any end of a name: norm is also input_layernorm."""
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    theirs = moved(peft.get_peft_model(plain(base), config))
    theirs.save_pretrained(str(tmp_path / "saved"))  # type: ignore[operator]
    ours = adapters(base, {"path": tmp_path / "saved"})
    model = ours.fit(plain(base)).eval()
    assert {"model.norm.weight", "model.layers.0.input_layernorm.weight"} < trained(model).keys()
    ours.write(model, trained(model), tmp_path / "again")
    again = peft.PeftModel.from_pretrained(plain(base), str(tmp_path / "again")).eval()
    torch.testing.assert_close(logits(again), logits(theirs))


@pytest.mark.parametrize("name", ["lora_A", "lora_B", "base_layer"])
def test_a_name_that_is_pefts_own_is_refused(name: str, base: Path) -> None:
    with pytest.raises(UserError, match="PEFT calls weights"):
        adapters(base, {"name": name}).fit(plain(base))


def headless(folder: Path) -> Path:
    """A body without a classifier's head."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=48)).save_pretrained(folder)
    return folder


def classifier(folder: Path, seed: int, labels: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return build_classifier(
        "AutoModelForSequenceClassification", str(folder), None, [str(n) for n in range(labels)], "model", print
    )


def test_a_head_that_starts_at_random_is_trained_or_refused(tmp_path: Path) -> None:
    folder = headless(tmp_path / "body")
    with pytest.raises(UserError, match="starts at random, and would be in no file"):
        adapters(folder, {"train_also": []}).fit(classifier(folder, 0))
    adapters(folder, {}).fit(classifier(folder, 0))


def test_a_head_that_starts_at_random_does_not_tell_bases_apart(tmp_path: Path) -> None:
    folder = headless(tmp_path / "body")
    ours = adapters(folder, {})
    model = moved(ours.fit(classifier(folder, 0)))
    ours.write(model, trained(model), tmp_path / "saved")
    adapters(folder, {"path": tmp_path / "saved"}).fit(classifier(folder, 1))


@pytest.mark.parametrize("method", ["prompt", "prefix", "p-tuning"])
def test_a_model_that_takes_no_virtual_tokens_is_refused(method: str) -> None:
    """ALBERT's embeddings are narrower than its hidden states."""
    sizes = {"vocab_size": 40, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 1}
    model = AlbertForSequenceClassification(AlbertConfig(**sizes, num_attention_heads=2, intermediate_size=48))
    with pytest.raises(UserError, match=r"Albert.*(cannot take|embeds in 16 numbers)") as words:
        adapters(None, {"method": method, "virtual_tokens": 4}).fit(model)
    assert words.value.problems[0].fix == "give lora"
