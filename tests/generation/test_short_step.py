"""The step in few calls gives the logits of Transformers' own pass, and is not taken where it would leave something
out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from drivetrain.generation import local_forward, short_step
from drivetrain.generation.local_forward import LocalForward, stores_of
from drivetrain.generation.prepacked_weights import Product, prepacked
from drivetrain.generation.row_stores import CachedRows
from drivetrain.generation.sampling import Choice
from drivetrain.generation.short_step import ShortStep, short_step_of
from drivetrain.memory.recompute import apply_recompute
from drivetrain.models.language_head import TargetHead
from tests.generation.small_models import KINDS, SIZE, model_of, prompts

FORM = ("llama", "qwen2", "qwen3", "mistral")


def logits_of_steps(model: Any, count: int = 12, forward: Any = None) -> tuple[list[Tensor], list[list[int]]]:
    """Continues prompts of several lengths by given tokens; returns the logits of each step, and the sequences."""
    forward = forward or LocalForward(model)
    store = stores_of(forward, model)(forward)
    rows = [list(each) for each in prompts(4, longest=12)]
    found: list[Tensor] = []

    def see(logits: Tensor) -> list[Choice]:
        found.append(logits.float())
        return [Choice(0)] * len(logits)

    store.start(rows, see)
    for step in range(count):
        tokens = [(7 * step + 11 * row) % SIZE for row in range(len(rows))]
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        store.next(tokens, see)
    return found[1:], rows


@torch.no_grad()
def expected_of(model: Any, rows: Sequence[Sequence[int]], count: int = 12) -> list[Tensor]:
    """Returns Transformers' logits of whole sequences, without a cache."""
    each = [model(torch.tensor([row]), use_cache=False).logits[0, -count:].float() for row in rows]
    return list(torch.stack(each, 1))


def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the rows of each short step."""
    found: list[int] = []
    plain = ShortStep.__call__

    def counted(self: ShortStep, cache: Any, ids: Tensor, *others: Any) -> Tensor:
        found.append(len(ids))
        return plain(self, cache, ids, *others)

    monkeypatch.setattr(ShortStep, "__call__", counted)
    return found


def close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


@pytest.mark.parametrize("packs", [False, True], ids=["as they lie", "prepacked"])
@pytest.mark.parametrize("kind", FORM)
def test_logits_are_those_of_whole_sequences(kind: str, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 steps behind prompts of several lengths: of Mistral through its window of 8."""
    monkeypatch.setattr("drivetrain.generation.prepacked_weights.LEAST", 1)
    model, counted = model_of(kind), taken(monkeypatch)
    if packs:
        with prepacked(model):
            found, rows = logits_of_steps(model)
    else:
        found, rows = logits_of_steps(model)
    close(found, expected_of(model, rows), 1e-5)
    assert counted[-12:] == [4] * 12


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 3)]),
    st.sampled_from([2, 8, 10]),
    st.booleans(),
    st.sampled_from(["silu", "gelu"]),
)
def test_heads_of_any_number_and_width_are_rotated_and_joined(
    heads: tuple[int, int], width: int, bias: bool, activation: str
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=width, vocab_size=SIZE, attention_bias=bias, mlp_bias=bias,
        hidden_act=activation, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0,
        "original_max_position_embeddings": 16},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, each in model.named_parameters():
        nn.init.normal_(each, mean=1.0 if "norm" in name else 0.0, std=0.3)
    assert short_step_of(model) is not None
    found, rows = logits_of_steps(model)
    close(found, expected_of(model, rows), 1e-5)


@pytest.mark.parametrize("how", ["bf16", "autocast"])
@pytest.mark.parametrize("kind", [*FORM, "llama with keys of each head's own"])
def test_in_bf16_it_is_as_far_from_fp32_as_the_model_is(kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind not in FORM:
        kind = "llama"
        monkeypatch.setitem(KINDS, kind, {**KINDS[kind], "num_key_value_heads": 4})
    model, counted = model_of(kind), taken(monkeypatch)
    _, rows = logits_of_steps(model)
    exact = torch.stack(expected_of(model, rows))
    if how == "bf16":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found, _ = logits_of_steps(model)
        rounded = expected_of(model, rows)
    own, of_model = ((torch.stack(each) - exact).square().mean().sqrt() for each in (found, rounded))
    assert 0 < own < 1.3 * of_model < 0.1 * exact.square().mean().sqrt()
    assert counted[-12:] == [4] * 12


def test_adapters_work_in_it_as_they_are_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    base = model_of("llama")
    adapted: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj", "o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    adapted.eval()
    inner, counted = adapted.get_base_model(), taken(monkeypatch)
    found, rows = logits_of_steps(inner)
    close(found, expected_of(adapted, rows), 1e-5)
    with adapted.disable_adapter():
        off, rows = logits_of_steps(inner)
        close(off, expected_of(adapted, rows), 1e-5)
    assert float((off[0] - found[0]).abs().max()) > 0.1
    assert counted[-12:] == [4] * 12


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FORM])
def test_models_of_another_form_have_none(kind: str) -> None:
    assert short_step_of(model_of(kind)) is None


class Scaled(LlamaForCausalLM):
    def forward(self, *args: Any, **named: Any) -> Any:
        found = super().forward(*args, **named)
        found.logits = found.logits * 2
        return found


def test_a_class_of_ones_own_over_llama_has_none() -> None:
    assert short_step_of(Scaled(model_of("llama").config).eval()) is None


@pytest.mark.parametrize("part", ["model", "model.layers.1", "model.layers.0.mlp", "model.layers.2.self_attn"])
def test_what_hangs_on_a_module_that_is_passed_over_still_runs(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    forward, counted = LocalForward(model), taken(monkeypatch)
    logits_of_steps(model, 2, forward)
    before, seen = len(counted), list[int]()
    handle = model.get_submodule(part).register_forward_pre_hook(lambda *_: seen.append(1))
    logits_of_steps(model, 2, forward)
    assert (len(counted), len(seen)) == (before, 3), "a prompt and two steps"
    handle.remove()
    logits_of_steps(model, 2, forward)
    assert len(counted) == before + 2


def test_dropout_in_training_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counted = model_of("llama"), taken(monkeypatch)
    logits_of_steps(model, 2)
    before = len(counted)
    model.train()
    logits_of_steps(model, 2)
    assert len(counted) == before


def _double_logits(model: Any) -> Any:
    return model.register_forward_hook(lambda *given: setattr(given[2], "logits", given[2].logits * 2))


def _other_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, SIZE)


def _other_mlp(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda given: 2 * type(mlp).forward(mlp, given)


def _adapter(model: Any) -> None:
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["k_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    adapted.eval()


def _other_norm(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda given: 2 * type(norm).forward(norm, given)


@pytest.mark.parametrize("change", [_double_logits, _other_head, _other_mlp, _adapter, _other_norm])
def test_what_is_changed_in_a_model_after_the_step_was_made_holds(change: Callable[[Any], Any]) -> None:
    model = model_of("llama")
    forward = LocalForward(model)
    store = stores_of(forward, model)(forward)
    found: list[Tensor] = []

    def see(logits: Tensor) -> list[Choice]:
        found.append(logits)
        return [Choice(0)] * len(logits)

    store.start([[5, 6, 7]], see)
    [[before]] = expected_of(model, [[5, 6, 7, 8]], 1)
    change(model)
    [[after]] = expected_of(model, [[5, 6, 7, 8]], 1)
    store.next([8], see)
    assert float((after - before).abs().max()) > 0.1 * float(before.abs().max())
    # the adapter and the second block's part have changed what the prompt left in the cache, too
    if change in (_double_logits, _other_head, _other_norm):
        close(found[1:], [after[None]], 1e-5)
    else:
        assert float((found[1] - before).abs().max()) > 0.01 * float(before.abs().max())


def _last_narrow(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.weight.mul_(-2)


def _hook_of_last_out(model: Any) -> None:
    model.model.layers[2].self_attn.o_proj.register_forward_hook(lambda *given: given[2] * -2)


def _packed_anew(model: Any) -> None:
    _last_narrow(model)
    with prepacked(model):  # finds the layers taken
        pass


@pytest.mark.parametrize("change", [_last_narrow, _hook_of_last_out, _packed_anew])
@torch.no_grad()
def test_products_by_copies_are_those_of_the_weights_in_each_step(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is made after the layers that give keys and values, so that those in the cache stay right."""
    monkeypatch.setattr("drivetrain.generation.prepacked_weights.LEAST", 1)
    model, found = model_of("llama"), list[Tensor]()
    expected = expected_of(model, [[5, 6, 7, 8, 9]], 2)

    def see(logits: Tensor) -> list[Choice]:
        found.append(logits)
        return [Choice(0)]

    forward = LocalForward(model)
    with prepacked(model):
        store = stores_of(forward, model)(forward)
        store.start([[5, 6, 7]], see)
        for token in (8, 9):
            store.next([token], see)
        close(found[1:], expected, 1e-5)
        change(model)
        store.next([10], see)
    store.next([11], see)  # without copies
    after = expected_of(model, [[5, 6, 7, 8, 9, 10, 11]], 2)
    close(found[3:], after, 1e-5)
    before = expected_of(model_of("llama"), [[5, 6, 7, 8, 9, 10, 11]], 2)
    assert float((after[0] - before[0]).abs().max()) > 0.1 * float(before[0].abs().max())


@torch.no_grad()
@pytest.mark.parametrize("learns", [False, True])
def test_copies_that_were_made_anew_for_new_weights_are_taken(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind each update of a model that learns from its answers: four products a block, and that of the head. No
    module runs then, so that PyTorch need not keep count of changes (inference mode)."""
    monkeypatch.setattr("drivetrain.generation.prepacked_weights.LEAST", 1)
    made: list[Tensor] = []
    plain = Product.times
    monkeypatch.setattr(Product, "times", lambda self, given: made.append(given) or plain(self, given))
    model = model_of("llama")
    if learns:
        TargetHead(model, fused=True)
    forward = LocalForward(model)
    stores = stores_of(forward, model)
    for _ in range(2):
        with prepacked(model):
            store = stores(forward)
            store.start([[5, 6, 7]], lambda _: [Choice(0)])
            before = len(made)
            store.next([8], lambda _: [Choice(0)])
            assert len(made) - before == 3 * 4 + 1
            assert all(given.is_inference() for given in made[before + 1 :])
        model.model.layers[0].mlp.down_proj.weight.mul_(2)


@pytest.mark.parametrize("selective", [False, True])
def test_a_model_that_recomputes_takes_it(selective: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models that learn from their answers often do."""
    model, counted = model_of("llama"), taken(monkeypatch)
    apply_recompute(model, selective)
    found, rows = logits_of_steps(model)
    close(found, expected_of(model, rows), 1e-5)
    assert counted[-12:] == [4] * 12
    twice = model_of("llama")
    twice.model.layers[0].forward = twice.model.layers[0].forward
    apply_recompute(twice)
    assert short_step_of(twice) is None, "what it recomputes may be another's code"


def test_a_module_whose_forward_pass_was_replaced_is_not_passed_over() -> None:
    model = model_of("llama")
    block = model.model.layers[0]
    plain = block.forward
    block.forward = lambda *args, **named: plain(*args, **named)
    assert short_step_of(model) is None


def test_a_step_that_gives_other_logits_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(short_step, "_turned", lambda given, _: given)
    model = model_of("llama")
    with caplog.at_level(logging.INFO, local_forward.__name__):
        found, rows = logits_of_steps(model)
    close(found, expected_of(model, rows), 1e-5)
    assert "has no short step: it gave other logits" in caplog.text


def test_blocks_without_what_the_step_reads_go_on_without_it(caplog: pytest.LogCaptureFixture) -> None:
    """As another version of Transformers may have them."""
    model = model_of("llama")
    found, _ = logits_of_steps(model)
    for block in model.model.layers:
        block.mlp.up = block.mlp._modules.pop("up_proj")
        block.mlp.forward = functools.partial(_mlp, block.mlp)
    local_forward._WORKS.pop(model)
    with caplog.at_level(logging.INFO, local_forward.__name__):
        again, _ = logits_of_steps(model)
    close(again, found, 1e-5)
    assert "no attribute 'up_proj'" in caplog.text


def _mlp(mlp: Any, given: Tensor) -> Tensor:
    found: Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(given)) * mlp.up(given))
    return found


def test_a_step_is_tried_once_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counted = model_of("llama"), taken(monkeypatch)
    forward = LocalForward(model)
    for _ in range(3):
        store = stores_of(forward, model)(forward)
        assert isinstance(store, CachedRows)
    assert len(counted) == 1
