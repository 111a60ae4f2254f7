from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations import sdpa_attention

from drivetrain.data.row_shape import Rows
from drivetrain.memory.recompute import apply_recompute
from drivetrain.models import packed_attention, packed_kernels
from drivetrain.models.packed_attention import NAME, PackedAttention, bounds_of, use_packed_attention
from drivetrain.models.planned_device import planned_for
from drivetrain.plan.machines import cluster
from tests.properties import examples
from tests.ranks import RankPool

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VOCABULARY = 60
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},  # learned positions
    "qwen2": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 3},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 3},
}
LENGTHS = (5, 1, 9, 2)


def build(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    fields = {**SIZES, **MODELS.get(kind, {}), **fields}
    config = transformers.CONFIG_MAPPING[kind](
        vocab_size=VOCABULARY, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0, **fields
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def packed(model: nn.Module) -> PackedAttention:
    words: list[str] = []
    attention = use_packed_attention(model, "auto", words.append)
    assert attention is not None, words
    return attention


def refusal(model: nn.Module, choice: str = "auto") -> str:
    words: list[str] = []
    assert use_packed_attention(model, choice, words.append) is None
    return words[0]


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def row(parts: list[Tensor]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return {"input_ids": torch.cat(parts)[None], "position_ids": positions[None]}


def alone(model: Any, parts: list[Tensor]) -> Tensor:
    return torch.cat([model(input_ids=part[None]).logits[0] for part in parts])


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    logits.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(own: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert own.keys() == theirs.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_sequences_are_computed_as_if_alone(kind: str, recompute: str | None) -> None:
    model, other, parts = build(kind), build(kind), sequences()
    packed(model)
    if recompute:
        apply_recompute(model, recompute == "selective")
    logits, expected = model.train()(**row(parts)).logits[0], alone(other.train(), parts)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, logits), gradients(other, expected))


def test_rows_may_hold_unlike_numbers_of_sequences() -> None:
    model, other = build("qwen2"), build("qwen2")
    packed(model)
    rows = [sequences((4, 3, 5)), sequences((12,)), sequences((1, 11))]
    batch = {name: torch.cat([row(parts)[name] for parts in rows]) for name in ("input_ids", "position_ids")}
    logits = model(**batch).logits.flatten(0, 1)
    expected = torch.cat([alone(other, parts) for parts in rows])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, logits), gradients(other, expected))


@pytest.mark.parametrize("kind", MODELS)
def test_no_sequence_sees_another(kind: str) -> None:
    model, parts = build(kind).eval(), sequences()
    packed(model)
    before = model(**row(parts)).logits[0].split(LENGTHS)
    parts[2] = (parts[2] + 7) % VOCABULARY
    after = model(**row(parts)).logits[0].split(LENGTHS)
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, True, False, True]


def test_only_pairs_within_a_sequence_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral", sliding_window=4)
    packed(model)
    seen = []
    kernel = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **how: Any) -> Tensor:
        seen.append((query.shape[2], key.shape[2], None if attn_mask is None else tuple(attn_mask.shape)))
        return kernel(query, key, value, attn_mask=attn_mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model(**row(sequences()))
    masks = {5: (1, 1, 5, 5), 9: (1, 1, 9, 9)}
    assert seen == 2 * [(length, length, masks.get(length)) for length in LENGTHS]


@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_one_sequence_and_padded_ones_go_the_usual_way(kind: str) -> None:
    model, other = build(kind).eval(), build(kind).eval()
    packed(model)
    ids = torch.stack([torch.cat(sequences((8,))), torch.cat(sequences((3, 5)))])
    positions = torch.arange(8).expand(2, 8)
    assert torch.equal(model(input_ids=ids, position_ids=positions).logits, other(input_ids=ids).logits)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    assert torch.equal(model(**given).logits, other(**given).logits)


def test_micro_batches_in_flight_do_not_mix_recomputing() -> None:
    model, other = build("llama"), build("llama")
    packed(model)
    apply_recompute(model)
    model.train()
    first, second = sequences(), sequences((3, 3, 11))
    losses = [model(**row(parts)).logits.square().sum() for parts in (first, second)]
    for loss in losses:  # in the order of a pipeline
        loss.backward()
    sum(alone(other, parts).square().sum() for parts in (first, second)).backward()  # type: ignore[union-attr]
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_attention_drops_while_training_alike_when_recomputing() -> None:
    found = []
    for recompute in (False, True):
        model = build("llama", attention_dropout=0.5)
        packed(model)
        if recompute:
            apply_recompute(model)
        torch.manual_seed(3)
        logits = model.train()(**row(sequences())).logits
        found.append(gradients(model, logits))
        assert not torch.allclose(logits, model.eval()(**row(sequences())).logits, atol=1e-3)
    assert_same_gradients(*found)


class _Neighbours(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.roll(1, dims=1)


def _mixing() -> Any:
    model = build("llama")
    model.model.norm = _Neighbours()
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "attention that is capped": (lambda: build("gemma2", head_dim=8, num_key_value_heads=2), "asks for softcap"),
    "attention sinks": (lambda: build("gpt_oss", head_dim=8, num_key_value_heads=2, num_local_experts=2), "s_aux"),
    "a window by mask alone": (
        lambda: build("phimoe", sliding_window=4, num_local_experts=2, num_key_value_heads=2),
        "does not pass the sliding window to its attention",
    ),
    "an attention of its own": (lambda: build("falcon"), "cannot be replaced"),
    "positions that it counts": (lambda: build("bloom", n_head=4), "takes no positions"),
    "layers that remember": (lambda: build("qwen3_next"), "layers of other kinds than attention: linear_attention"),
    "a layer that looks at neighbours": (_mixing, "mixes the sequences of a row elsewhere"),
    "no Transformers model": (lambda: nn.Linear(2, 2), "no Transformers model"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_take_them_is_left_as_it_was(make: Callable[[], Any], words: str) -> None:
    model = make()
    before = getattr(model, "config", None) and model.config._attn_implementation
    assert words in refusal(model)
    assert model.training
    assert not model._forward_pre_hooks
    assert (getattr(model, "config", None) and model.config._attn_implementation) == before


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("phimoe", {"num_local_experts": 2}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_a_window_longer_than_what_is_tried_is_seen_in_the_config(kind: str, fields: dict[str, Any]) -> None:
    words = refusal(build(kind, sliding_window=500, num_key_value_heads=2, **fields))
    assert "does not pass the sliding window to its attention" in words


def test_eager_attention_packs_nothing() -> None:
    assert "all pairs" in refusal(build("llama"), "eager")


def test_without_weights_nothing_is_tried() -> None:
    with torch.device("meta"):
        model = build("llama")
    packed(model)
    assert model.config._attn_implementation == NAME


rows_of_lengths = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4)


@settings(deadline=None, max_examples=examples(60))
@given(rows_of_lengths)
def test_boundaries_are_where_positions_begin_again(rows: list[list[int]]) -> None:
    total = max(map(sum, rows))
    rows = [[*lengths, total - sum(lengths)] if sum(lengths) < total else lengths for lengths in rows]
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    bounds = bounds_of(positions)
    if all(len(lengths) == 1 for lengths in rows):
        assert bounds is None
        return
    assert bounds is not None
    assert bounds.shape[:3] == (len(rows), 1, max(map(max, rows)))
    assert bounds.untyped_storage().nbytes() == 4 * len(rows) * bounds.shape[3]
    for own, lengths in zip(bounds[:, 0, 0].tolist(), rows, strict=True):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        assert own == [0, *ends, *[total] * (len(own) - 1 - len(ends))]


# --- kernels for GPUs, as far as a CPU can tell -----------------------------------------------------------------------

SHAPES = [(1, None), (2, None), (4, 3)]  # heads of keys, window
FIXED = [None, Rows(12, 4, 9)]  # rows of ever other lengths, and of one


def attended(
    key_heads: int, fixed: Rows | None = None, width: int = 8
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, nn.Module]:
    torch.manual_seed(0)
    parts = [torch.randn(2, heads, 12, width) for heads in (4, key_heads, key_heads)]
    positions = torch.tensor([[*range(5), *range(7)], [*range(2), *range(4), *range(6)]])
    bounds = bounds_of(positions, fixed)
    assert bounds is not None
    module = nn.Module()
    module.is_causal, module.num_key_value_groups = True, 4 // key_heads  # type: ignore[assignment]
    return (parts[0], parts[1], parts[2]), bounds, module


def one_by_one(key_heads: int, window: int | None) -> Tensor:
    tensors, bounds, module = attended(key_heads)
    return PackedAttention("sdpa")(module, *tensors, bounds, scaling=0.3, sliding_window=window)[0]


def end_to_end(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, window: int) -> Tensor:
    """Returns what kernels for sequences of unlike length document: (total, heads, width), causal."""
    assert starts.dtype == torch.int32
    number = torch.bucketize(torch.arange(len(query)), starts[1:].long(), right=True)
    behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (number[:, None] == number) & (behind >= 0) & ((behind <= window) if window >= 0 else True)
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1).transpose(0, 1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query.transpose(0, 1), key, value, seen, scale=scale).transpose(0, 1)


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("choice", "dtype", "dropout", "is_ampere", "installed", "expected"),
    [
        ("auto", HALF, 0.0, True, True, "varlen"),
        ("auto", HALF, 0.1, True, True, "flash"),
        ("flash", HALF, 0.0, True, True, "flash"),
        ("auto", HALF, 0.0, True, False, "varlen"),
        ("auto", torch.float16, 0.0, False, True, "flex"),
        ("auto", HALF, 0.1, True, False, "sdpa"),
        ("auto", FULL, 0.0, True, True, "flex"),
        ("flash", HALF, 0.0, True, False, "varlen"),
        ("flash", torch.float16, 0.0, False, True, "sdpa"),
        ("flex", HALF, 0.0, True, True, "flex"),
        ("sdpa", HALF, 0.0, True, True, "sdpa"),
    ],
)
def test_a_gpu_takes_the_first_kernel_that_it_has(
    choice: str,
    dtype: torch.dtype,
    dropout: float,
    is_ampere: bool,
    installed: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_kernels, "find_spec", lambda _: object() if installed else None)
    assert packed_kernels.kernel_of(choice, dtype, dropout, is_ampere, 64) == expected


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [(HALF, 8, "varlen"), (HALF, 256, "varlen"), (HALF, 20, "flex"), (HALF, 320, "flex"), (FULL, 8, "sdpa")],
)
def test_heads_of_other_widths_go_to_the_kernel_that_takes_them(dtype: torch.dtype, width: int, expected: str) -> None:
    assert packed_kernels.kernel_of("auto", dtype, 0.0, True, width) == expected


@pytest.mark.parametrize(
    ("hip", "capability", "expected"), [(None, (7, 5), False), (None, (8, 0), True), ("7.0", (9, 0), False)]
)
def test_amds_numbers_are_not_taken_for_nvidias(
    hip: str | None, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert packed_attention._is_ampere.__wrapped__(torch.device("cuda", 0)) is expected


def test_under_autocast_a_kernel_gets_autocasts_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after rotary positions: queries and keys in fp32, values in 16 bits. A CPU plays the GPU."""
    asked: list[set[torch.dtype]] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        asked.append({query.dtype, key.dtype, value.dtype})
        return torch.zeros_like(query)

    monkeypatch.setattr(packed_attention, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(packed_attention, "_is_ampere", lambda _: True)
    monkeypatch.setattr(packed_kernels, "find_spec", lambda _: None)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(packed_kernels, "_has_varlen", lambda: True)
    (query, key, value), bounds, module = attended(2)
    with torch.autocast("cpu", dtype=HALF):
        found, _ = PackedAttention("auto")(module, query, key, value.to(HALF), bounds, scaling=0.3)
    assert asked == [{HALF}]
    assert found.dtype == HALF


@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize(("key_heads", "window"), SHAPES)
def test_pytorchs_kernel_is_asked_for_the_same(
    key_heads: int, window: int | None, fixed: Rows | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *where: Any, scale: float, window_size: Any, enable_gqa: bool
    ) -> Tensor:
        starts, same, longest, also = where
        assert starts is same
        assert (longest, also, window_size[1], enable_gqa) == (*[9 if fixed else 7] * 2, 0, key_heads < 4)
        return end_to_end(q, k, v, starts, scale, window_size[0])

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    tensors, bounds, _ = attended(key_heads, fixed)
    found = packed_kernels.varlen_of_torch(*tensors, bounds, window, True, scaling=0.3)
    torch.testing.assert_close(found, one_by_one(key_heads, window))


@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize(("key_heads", "window"), SHAPES)
def test_flash_attention_is_asked_for_the_same(
    key_heads: int, window: int | None, fixed: Rows | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, *where: Any, causal: bool, window_size: Any, **how: Any) -> Tensor:
        assert causal
        assert where[2:] == ((9, 9) if fixed else (7, 7))
        assert how["dropout_p"] == 0.25
        return end_to_end(q, k, v, where[0], how["softmax_scale"], window_size[0])

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    tensors, bounds, _ = attended(key_heads, fixed)
    found = packed_kernels.flash(*tensors, bounds, window, True, scaling=0.3, dropout=0.25)
    torch.testing.assert_close(found, one_by_one(key_heads, window))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize(("key_heads", "window"), SHAPES)
def test_flex_attention_is_asked_for_the_same(
    key_heads: int, window: int | None, fixed: Rows | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncompiled(*tensors: Tensor, training: bool, **how: Any) -> Any:
        del training
        return flex_attention(*tensors, **how)

    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(packed_attention, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(packed_attention, "_is_ampere", lambda _: True)
    tensors, bounds, module = attended(key_heads, fixed)
    how = {"scaling": 0.3, "dropout": 0.0, "sliding_window": window}
    found, _ = PackedAttention("flex")(module, *tensors, bounds, **how)
    torch.testing.assert_close(found, one_by_one(key_heads, window))


@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize(("key_heads", "window"), SHAPES)
def test_where_a_gpu_has_no_kernel_sequences_get_rows_of_their_own(
    key_heads: int, window: int | None, fixed: Rows | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients are those of sequences one by one, by one call of attention."""
    tensors, bounds, module = attended(key_heads, fixed)
    weights = torch.randn(2, 12, 4, 8)
    expected = attended_and_gradients(PackedAttention("sdpa"), module, tensors, bounds, window, weights)
    calls = counted_calls(monkeypatch)
    monkeypatch.setattr(packed_attention, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(packed_attention, "_is_ampere", lambda _: True)
    found = attended_and_gradients(PackedAttention("sdpa"), module, tensors, bounds, window, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(calls) == 1


def test_encoders_get_rows_of_their_own_with_attention_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row then has a mask, where a text ends. In fp32 too: FlexAttention would compile for every batch."""
    tensors, bounds, module = attended(4)
    module.is_causal = False  # type: ignore[assignment]
    weights = torch.randn(2, 12, 4, 8)
    expected = attended_and_gradients(PackedAttention("auto"), module, tensors, bounds, None, weights)
    monkeypatch.setattr(packed_attention, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(packed_attention, "_is_ampere", lambda _: True)
    found = attended_and_gradients(PackedAttention("auto"), module, tensors, bounds, None, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_dropout_in_attention_does_not_take_a_gpu_through_sequences_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BERT and GPT-2 have dropout in attention as a rule, and PyTorch's kernel for sequences end to end has none. What
    is dropped is another share of each head's weights at each call, and the mean over calls is the whole."""
    (query, key, _), bounds, module = attended(4)
    calls = counted_calls(monkeypatch)
    monkeypatch.setattr(packed_attention, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(packed_attention, "_is_ampere", lambda _: True)
    ones = torch.ones(2, 4, 12, 8)
    found = [
        PackedAttention("auto")(module, query, key, ones, bounds, scaling=0.3, dropout=0.25)[0] for _ in range(400)
    ]
    assert len(calls) == 400
    assert not torch.equal(found[0], found[1])
    assert torch.stack(found).mean(0) == pytest.approx(1.0, abs=0.15)
    assert float(torch.stack(found).mean()) == pytest.approx(1.0, abs=0.01)


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list that grows by one with every call of Transformers' attention by PyTorch."""
    calls: list[None] = []
    theirs = sdpa_attention.sdpa_attention_forward

    def seen(*given: Any, **how: Any) -> Any:
        calls.append(None)
        return theirs(*given, **how)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", seen)
    return calls


# --- wrapped ----------------------------------------------------------------------------------------------------------


def wrapped_gradients() -> list[dict[str, Tensor]]:
    """On a rank, under DDP and under FSDP2; every rank has the same row."""
    found = []
    for wrap in (_ddp, _fsdp):
        model = build("mistral").train()
        packed(model)
        apply_recompute(model)
        wrap(model)(**row(sequences())).logits.square().mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        found.append({n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()})
    return found


def _ddp(model: Any) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp(model: Any) -> nn.Module:
    for module in [*model.model.layers, model]:
        fully_shard(module)
    return model  # type: ignore[no-any-return]


def test_wrapped_models_take_packed_sequences(ranks: Callable[[int], RankPool]) -> None:
    model = build("mistral")
    expected = gradients(model, alone(model, sequences()))
    for of_rank in ranks(2).run(wrapped_gradients):
        for own in of_rank:
            assert_same_gradients(own, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["varlen", "flex", "sdpa"])
@pytest.mark.parametrize(("key_heads", "window"), SHAPES)
def test_on_a_gpu_each_kernel_attends_as_sequence_by_sequence(
    kernel: str, key_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, as near as 16 bits allow; flex in fp32."""
    dtype, near = (HALF, 3e-2) if kernel == "varlen" else (FULL, 1e-3)
    tensors, bounds, module = attended(key_heads, width=16)
    on_gpu = [tensor.to("cuda", dtype).requires_grad_() for tensor in tensors]
    weights = torch.randn(2, 12, 4, 16)
    expected = attended_and_gradients(PackedAttention("sdpa"), module, tensors, bounds, window, weights)
    monkeypatch.setitem(packed_kernels.CHOICES, "auto", (kernel,))
    bounds, weights = on_the_gpu(bounds), weights.to("cuda", dtype)
    found = attended_and_gradients(PackedAttention("auto"), module, on_gpu, bounds, window, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float().cpu(), other, atol=near, rtol=near)


def attended_and_gradients(
    attention: PackedAttention,
    module: nn.Module,
    tensors: Sequence[Tensor],
    bounds: Tensor,
    window: int | None,
    weights: Tensor,
) -> list[Tensor]:
    """Returns the output and the gradients of queries, keys and values."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    output = attention(module, *inputs, bounds, scaling=0.3, sliding_window=window)[0]
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def on_the_gpu(bounds: Tensor) -> Tensor:
    """Returns boundaries on the GPU, as `bounds_of` makes them there."""
    positions = torch.tensor([[*range(5), *range(7)], [*range(2), *range(4), *range(6)]], device="cuda")
    made = bounds_of(positions)
    assert made is not None
    assert torch.equal(made.cpu(), bounds)
    return made


@pytest.mark.parametrize("masked", [False, True])
def test_heads_of_a_group_get_keys_of_their_own_in_fp32_on_a_gpu(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a mask Transformers repeats them."""
    (query, key, value), _, module = attended(2)
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril() if masked else None
    expected, _ = PackedAttention("auto")(module, query, key, value, mask, scaling=0.3)
    heads: list[int] = []
    theirs = sdpa_attention.sdpa_attention_forward

    def seen(module: nn.Module, query: Tensor, key: Tensor, *given: Any, **how: Any) -> Any:
        heads.append(key.shape[1])
        return theirs(module, query, key, *given, **how)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", seen)
    with planned_for(cluster("1xH100").host):
        found, _ = PackedAttention("auto")(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)
    assert heads == [2 if masked else 4]
