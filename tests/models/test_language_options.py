from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from drivetrain.engines.mesh import tensor_parallel, tensor_plan
from drivetrain.engines.replicas import ThreadReplicas
from drivetrain.errors import UserError
from drivetrain.memory.recompute import apply_recompute
from drivetrain.models.language_options import (
    add_embedding_noise,
    attention_choices,
    context_length,
    freeze_all_but_last,
    is_scaled_dynamically,
    rope_scaling_config,
)
from drivetrain.models.packed_attention import use_packed_attention
from tests.ranks import RankPool

WIDTH, VOCABULARY = 16, 48


def config(kind: str = "llama", **fields: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.CONFIG_MAPPING[kind](
        **{"vocab_size": VOCABULARY, "use_cache": False, "max_position_embeddings": 64, **sizes, **tokens, **fields}
    )


def build(kind: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(kind, **fields), dtype=torch.float32)


# --- freezing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_only_the_last_blocks_are_trained(kind: str) -> None:
    model = build(kind)
    trained = freeze_all_but_last(model, 2)
    model(input_ids=torch.arange(6)[None]).logits.sum().backward()
    got = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert got == {name for name, _ in model.named_parameters() if ".1." in name or ".2." in name}
    assert trained == sum(p.numel() for name, p in model.named_parameters() if name in got)


@pytest.mark.parametrize("blocks", [0, 4])
def test_blocks_that_are_not_there_cannot_be_trained(blocks: int) -> None:
    with pytest.raises(UserError, match=r"train_last_blocks: .*has 3 repeated blocks\n    give 1 to 3"):
        freeze_all_but_last(build(), blocks)
    with pytest.raises(UserError, match="no repeated blocks"):
        freeze_all_but_last(nn.Linear(2, 2), 1)


# --- noise ------------------------------------------------------------------------------------------------------------


def added_noise(model: Any, forward: Callable[..., Any] | None = None, **inputs: Tensor) -> Tensor:
    """(B, T, d), by what the embedding gives beyond its weights."""
    seen: list[Tensor] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, args, output: seen.append(output - embedding.weight[args[0]]))
    (forward or model)(**inputs)
    hook.remove()
    return torch.cat(seen).detach()


def test_noise_is_uniform_within_its_bound_and_only_while_training() -> None:
    model = build()
    add_embedding_noise(model, alpha=5.0)
    ids = torch.randint(VOCABULARY, (16, 40))
    noise = added_noise(model.train(), input_ids=ids)
    bound = 5 / math.sqrt(40 * WIDTH)
    assert noise.abs().max() <= bound * (1 + 1e-5)
    assert noise.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)  # of a uniform distribution
    assert noise.mean() == pytest.approx(0, abs=0.02 * bound)
    assert not added_noise(model.eval(), input_ids=ids).any()


def test_each_sequence_has_the_bound_of_its_own_length() -> None:
    model = build()
    add_embedding_noise(model, alpha=5.0)
    assert use_packed_attention(model, "auto") is not None
    lengths = [1, 36, 9]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].repeat(40, 1)
    noise = added_noise(model.train(), input_ids=torch.zeros_like(positions), position_ids=positions)
    for length, own in zip(lengths, noise.split(lengths, dim=1), strict=True):
        assert own.abs().max() == pytest.approx(5 / math.sqrt(length * WIDTH), rel=0.03)
    mask = torch.ones(40, 46, dtype=torch.int64)
    mask[:, 10:] = 0
    noise = added_noise(model, input_ids=torch.zeros_like(mask), attention_mask=mask)
    assert noise.abs().max() == pytest.approx(5 / math.sqrt(10 * WIDTH), rel=0.03)


def test_noise_is_drawn_once_with_recompute_and_gradients_reach_the_embedding() -> None:
    found = []
    for recompute in (False, True):
        model = build(tie_word_embeddings=True).train()
        add_embedding_noise(model, 5.0)
        if recompute:
            apply_recompute(model)
        torch.manual_seed(1)
        model(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
        found.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*found)
    assert found[0].any()


def test_copies_and_replicas_have_noise_too() -> None:
    model = build()
    add_embedding_noise(model, 5.0)
    ids = torch.zeros(4, 8, dtype=torch.int64)
    copied = copy.deepcopy(model).train()
    assert added_noise(copied, input_ids=ids).any()
    positions = torch.arange(8).expand(4, 8)
    replicas = ThreadReplicas(model, 2).train()
    noise = added_noise(model, replicas, input_ids=ids, position_ids=positions)
    assert noise.shape == (4, 8, WIDTH)
    assert noise.abs().max() == pytest.approx(5 / math.sqrt(8 * WIDTH), rel=0.1)


IDS, POSITIONS = torch.arange(16).view(2, 8), torch.arange(8).expand(2, 8)


def embeddings_of_rank(way: str) -> tuple[Tensor, Tensor]:
    """Returns what the embedding gives in the end, and its gradient."""
    model = build().train()
    add_embedding_noise(model, 5.0)
    if way == "fsdp":
        fully_shard(model)
    else:
        plan = tensor_plan.plan_of(model, {**model._tp_plan, "model.embed_tokens": "embedding_rowwise"})
        options = {"sequence_parallel": way == "sequence", "loss_parallel": False}
        tensor_parallel.split(model, init_device_mesh("cpu", (2,)), plan, **options)
    given: list[Tensor] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, _args, output: given.append(output.detach()))
    torch.manual_seed(1)
    model(input_ids=IDS, position_ids=POSITIONS).logits.square().mean().backward()
    gradient = embedding.weight.grad
    return given[0], gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("way", ["fsdp", "tensor", "sequence"])
def test_noise_on_a_split_embedding_is_that_of_a_whole_one(way: str, ranks: Callable[[int], RankPool]) -> None:
    model = build().train()
    add_embedding_noise(model, 5.0)
    embedding, given = model.get_input_embeddings(), []
    embedding.register_forward_hook(lambda _module, _args, output: given.append(output.detach()))
    torch.manual_seed(1)
    model(input_ids=IDS, position_ids=POSITIONS).logits.square().mean().backward()
    assert not torch.allclose(given[0], embedding.weight[IDS], atol=0.1)
    parts = given[0].chunk(2, dim=1) if way == "sequence" else [given[0]] * 2
    for (own, gradient), part in zip(ranks(2).run(embeddings_of_rank, way), parts, strict=True):
        torch.testing.assert_close(own, part, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, embedding.weight.grad, rtol=1e-4, atol=1e-7)


# --- longer contexts --------------------------------------------------------------------------------------------------

GIVEN: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16},
    "llama3": {"type": "llama3", "factor": 4.0, "low_freq_factor": 2.0},
}


@pytest.mark.parametrize("kind", GIVEN)
def test_positions_are_scaled_as_transformers_does(kind: str) -> None:
    own = config(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    overrides = rope_scaling_config(own, GIVEN[kind])
    model = build(**overrides)
    context = 64 if kind == "dynamic" else 256
    original = {} if kind in ("linear", "dynamic") else {"original_max_position_embeddings": 64}
    named = {key: value for key, value in GIVEN[kind].items() if key != "type"}
    theirs = config(max_position_embeddings=context)
    theirs.rope_parameters = {"rope_theta": 5e5, **named, "rope_type": kind, "high_freq_factor": 4.0, **original}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](theirs)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.model.rotary_emb.attention_scaling == factor
    assert model.config.max_position_embeddings == context
    assert context_length(model.config) == context
    assert is_scaled_dynamically(model.config) == (kind == "dynamic")
    default = build(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).model.rotary_emb
    assert torch.equal(frequencies, default.inv_freq) == (kind == "dynamic")
    if kind == "dynamic":  # which scales as soon as a sequence is longer than the model was trained with
        model(input_ids=torch.zeros(1, 100, dtype=torch.int64))
        assert torch.equal(model.model.rotary_emb.inv_freq, ROPE_INIT_FUNCTIONS[kind](theirs, seq_len=100)[0])


@pytest.mark.parametrize("kind", GIVEN)
def test_a_saved_model_takes_it_and_keeps_it(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers_logging.disable_progress_bar()
    build().save_pretrained(tmp_path / "a")
    overrides = rope_scaling_config(transformers.AutoConfig.from_pretrained(tmp_path / "a"), GIVEN[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", **overrides)
    assert torch.equal(model.model.rotary_emb.inv_freq, build(**overrides).model.rotary_emb.inv_freq)
    model.save_pretrained(tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    transformers_logging.enable_progress_bar()
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert again.config.max_position_embeddings == model.config.max_position_embeddings
    assert "rope" not in caplog.text.lower()


def test_layers_that_see_a_window_keep_their_positions() -> None:
    own = config("gemma3_text", sliding_window=8, head_dim=8, num_key_value_heads=1)
    overrides = rope_scaling_config(own, {"type": "linear", "factor": 8.0})
    parameters = overrides["rope_parameters"]
    assert parameters["sliding_attention"] == own.rope_parameters["sliding_attention"]
    assert parameters["full_attention"] == {**own.rope_parameters["full_attention"], "rope_type": "linear", "factor": 8}
    model = build("gemma3_text", sliding_window=8, head_dim=8, num_key_value_heads=1, **overrides)
    model(input_ids=torch.zeros(1, 9, dtype=torch.int64))


def test_the_means_of_the_pretraining_may_be_set() -> None:
    given = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    found = rope_scaling_config(config(), given)
    assert found["max_position_embeddings"] == 64
    assert found["rope_parameters"]["original_max_position_embeddings"] == 32


REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "learned positions": ("gpt2", {"type": "linear", "factor": 2}, ["no rotary positions"]),
    "an unknown type": ("llama", {"type": "ntk", "factor": 2}, ["'ntk' is no known scaling", "linear, dynamic, yarn"]),
    "no type and no factor": ("llama", {}, ["it has no type", "it has no factor"]),
    "a factor of 1": ("llama", {"type": "linear", "factor": 1}, ["1 makes no context longer"]),
    "a factor in words": ("llama", {"type": "linear", "factor": "2"}, ["'2' makes no context longer"]),
    "a key of another type": ("llama", {"type": "linear", "factor": 2, "beta_fast": 3}, ["linear takes no beta_fast"]),
    "a value that is none": ("llama", {"type": "yarn", "factor": 2, "beta_fast": "x"}, ["'x' is no number above 0"]),
}


@pytest.mark.parametrize(("kind", "given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_scaled_is_refused(kind: str, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        rope_scaling_config(config(kind), given)
    assert all(part in str(caught.value) for part in words), str(caught.value)
    assert all(each.field.startswith("workload.model.rope_scaling") for each in caught.value.problems)


def test_scaled_positions_are_not_scaled_again() -> None:
    scaled = config(**rope_scaling_config(config(), GIVEN["llama3"]))
    with pytest.raises(UserError, match=r"scaled already \(llama3, 4.0\)"):
        rope_scaling_config(scaled, GIVEN["linear"])


def test_a_model_without_rotary_positions_has_the_context_of_its_table() -> None:
    assert context_length(config("gpt2")) == 64
    assert context_length(transformers.BloomConfig()) is None


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_that_this_machine_lacks_are_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = attention_choices()
    assert found["eager"] is None
    assert found["sdpa"] is None
    assert "GPU" in str(found["flash"])
    assert "backward" in str(found["flex"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("drivetrain.models.language_options.find_spec", lambda _: None)
    assert "not installed" in str(attention_choices()["flash"])
    assert attention_choices()["flex"] is None
    monkeypatch.setattr("drivetrain.models.language_options.find_spec", lambda name: name)
    assert attention_choices()["flash"] is None
