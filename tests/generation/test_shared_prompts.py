"""Rows that continue one prompt look at one copy of its keys and values, and get the logits that they got before."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.generation import shared_prompts
from drivetrain.generation.cache import SPARE_COLUMNS
from drivetrain.generation.local_forward import LocalForward, stores_of
from drivetrain.generation.prepacked_weights import prepacked
from drivetrain.generation.row_stores import CachedRows
from drivetrain.generation.sampling import Choice
from drivetrain.generation.shared_prompts import attention, pays
from tests.generation.small_models import KINDS, SIZE, model_of, prompts

KIND = ("llama", "qwen2", "qwen3")
PROMPTS = [list(each) for each in prompts(3, longest=12)]


@pytest.fixture(autouse=True)
def _short_prompts_are_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_prompts, "LEAST", 1)
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    yield
    torch.use_deterministic_algorithms(False)


class Rows:
    """Rows of a store, with the sequences that they hold and the logits behind their last tokens."""

    def __init__(self, model: Any) -> None:
        self.model, forward = model, LocalForward(model)
        self.store: Any = stores_of(forward, model)(forward)
        self.sequences: list[list[int]] = []
        self.logits = torch.zeros(0)

    def see(self, logits: Tensor) -> list[Choice]:
        self.logits = logits.float()
        return [Choice(0)] * len(logits)

    def join(self, *parts: tuple[Sequence[Sequence[int]], Sequence[int]]) -> Rows:
        """Each part: prompts that run together, and the prompt of each row."""
        begun = []
        for given, rows in parts:
            store = self.store.new()
            store.start(given, self.see)
            begun.append((store, rows))
            self.sequences += [list(given[row]) for row in rows]
        self.store.join(begun)
        return self

    def keep(self, rows: Sequence[int]) -> None:
        self.store.keep(rows)
        self.sequences = [self.sequences[row] for row in rows]

    def steps(self, count: int) -> None:
        """Continues all rows; the logits of each step are those of whole sequences without a cache."""
        for step in range(count):
            tokens = [(7 * step + 11 * row + 3 * len(each)) % SIZE for row, each in enumerate(self.sequences)]
            for sequence, token in zip(self.sequences, tokens, strict=True):
                sequence.append(token)
            self.store.next(tokens, self.see)
            expected = expected_of(self.model, self.sequences)
            apart, bound = float((self.logits - expected).abs().max()), 1e-5 * float(expected.abs().max())
            if apart > bound:  # by rounding alone, then those of whole sequences are as far from exact ones
                exact = expected_of(copy.deepcopy(self.model).double(), self.sequences)
                assert apart <= 1.5 * float((expected - exact).abs().max())


@torch.no_grad()
def expected_of(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    each = [model(torch.tensor([sequence]), use_cache=False).logits[0, -1].float() for sequence in sequences]
    return torch.stack(each)


@pytest.mark.parametrize("kind", [*KIND, "llama with keys of each head's own"])
def test_rows_of_several_prompts_come_go_and_give_the_logits_of_whole_sequences(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind not in KIND:
        kind = "llama"
        monkeypatch.setitem(KINDS, kind, {**KINDS[kind], "num_key_value_heads": 4})
    rows = Rows(model_of(kind)).join((PROMPTS, [0, 0, 1, 1, 1, 2, 2]))
    rows.steps(3)
    assert rows.store._cache.columns == 3, "of no prompt"
    rows.keep([0, 6, 2, 3])  # the last one takes the place of the second
    rows.steps(2)
    rows.join((PROMPTS[:1], [0, 0]), (PROMPTS[1:], [1, 0, 1, 0]))  # behind others that have positions of their own
    rows.steps(2)
    rows.keep([9, 1, 8, 3])  # none of the first prompt's
    rows.steps(2)
    assert rows.store._cache.columns == 9
    rows.keep([])
    rows.join((PROMPTS[2:], [0, 0, 0]))
    rows.steps(2)
    assert rows.store._cache.columns == 2


def test_rows_that_share_and_rows_that_do_not_stand_beside_each_other() -> None:
    rows = Rows(model_of("llama")).join((PROMPTS[1:], [1, 0]), (PROMPTS[:1], [0, 0, 0]))
    rows.steps(2)
    assert rows.store._shared
    rows.keep([0, 4, 2])
    rows.join((PROMPTS[:2], [0, 1]))
    rows.steps(2)


def test_a_store_that_shares_may_join_another() -> None:
    rows, other = (Rows(model_of("llama")).join((PROMPTS[:1], [0, 0])) for _ in range(2))
    for each in (rows, other):
        each.steps(2)
    assert rows.store._shared
    assert other.store._shared
    rows.store.join([(other.store, [1, 0, 1])])
    rows.sequences += [list(other.sequences[row]) for row in (1, 0, 1)]
    rows.steps(2)


def test_where_a_hook_comes_later_each_row_gets_a_copy_of_its_prompt() -> None:
    model = model_of("llama")
    rows = Rows(model).join((PROMPTS, [0, 0, 2, 2, 1, 1, 1]))
    rows.steps(2)
    seen: list[int] = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    rows.steps(2)
    assert seen
    assert not rows.store._shared
    assert rows.store._cache.columns == 4 + max(map(len, PROMPTS))
    handle.remove()
    rows.steps(1)
    rows.join((PROMPTS[:1], [0, 0]))
    rows.steps(1)
    assert rows.store._shared


def test_what_steps_by_copies_leave_can_be_changed_and_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in PyTorch's inference mode, whose tensors nothing else may change or differentiate."""
    monkeypatch.setattr("drivetrain.generation.prepacked_weights.LEAST", 1)
    model = model_of("llama")
    rows = Rows(model).join((PROMPTS, [0, 0, 1, 1, 2, 2]))
    with prepacked(model):
        rows.steps(SPARE_COLUMNS + 2)  # through buffers that grow
        assert rows.logits.is_inference(), "the steps were taken by copies"
        rows.keep([0, 5, 2])
        rows.join((PROMPTS[:1], [0, 0]))
        rows.steps(1)
    kept = [each for layer in rows.store._cache.layers for each in layer.kept()]
    assert not any(each.is_inference() for each in (*kept, *model.parameters(), *model.buffers()))
    model(torch.tensor([PROMPTS[0]])).logits.sum().backward()


def test_layers_with_a_window_keep_a_copy_for_each_row() -> None:
    rows = Rows(model_of("mistral")).join((PROMPTS[:2], [0, 0, 1, 1]))
    rows.steps(3)
    assert not rows.store._shared


@pytest.mark.parametrize("how", ["bf16", "autocast"])
@pytest.mark.parametrize("heads", [2, 4])
def test_in_bf16_they_are_as_far_from_fp32_as_the_model_is(
    heads: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "llama", {**KINDS["llama"], "num_key_value_heads": heads})
    model = model_of("llama")
    monkeypatch.setattr(Rows, "steps", _steps_only)
    sequences = _run(model).sequences
    exact = expected_of(model, sequences)
    if how == "bf16":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        rows = _run(model)
        assert rows.store._shared
        rounded = expected_of(model, rows.sequences)
    own, of_model = ((each - exact).square().mean().sqrt() for each in (rows.logits, rounded))
    assert 0 < own < 1.3 * of_model < 0.1 * exact.square().mean().sqrt()


def _run(model: nn.Module) -> Rows:
    rows = Rows(model).join((PROMPTS, [0, 0, 1, 1, 2, 2]))
    rows.steps(4)
    return rows


def _steps_only(rows: Rows, count: int) -> None:
    for step in range(count):
        tokens = [(7 * step + 11 * row) % SIZE for row in range(len(rows.sequences))]
        for sequence, token in zip(rows.sequences, tokens, strict=True):
            sequence.append(token)
        rows.store.next(tokens, rows.see)


def test_under_autocast_attention_keeps_32_bits() -> None:
    queries, keys, values = (torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    mask = torch.zeros(2, 1, 1, 5).index_fill_(3, torch.tensor([1]), -torch.inf)
    with torch.autocast("cpu", torch.bfloat16):
        found, sums = attention(queries, keys, values, mask, 0.4)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(queries, keys, values, mask, scale=0.4))
    scores = queries @ keys.mT * 0.4 + mask
    torch.testing.assert_close(sums, scores.logsumexp(-1))


@pytest.mark.parametrize(
    ("lengths", "rows", "is_quicker"),
    [([60], [0, 0], True), ([60], [0], False), ([60, 70], [0, 1, 1], False), ([10, 60], [0, 0, 1, 1], False)],
)
def test_short_prompts_and_prompts_of_one_row_are_copied(
    lengths: list[int], rows: list[int], is_quicker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert pays(lengths, rows) is is_quicker


def test_a_store_of_copies_takes_over_a_whole_store_as_it_is() -> None:
    rows = Rows(model_of("llama")).join((PROMPTS, [0, 1, 2]))
    assert isinstance(rows.store, CachedRows)
    assert not rows.store._shared
    rows.steps(2)
