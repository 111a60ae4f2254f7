"""Keys and values of rows that join others, in memory that held anything before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from drivetrain.generation.cache import RowCache
from tests.generation.small_models import model_of


@pytest.fixture(autouse=True)
def _new_memory_is_no_number() -> Iterator[None]:
    """PyTorch fills new memory with NaN, which it leaves as it is otherwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def filled(rows: int, columns: int, window: int | None, seed: int) -> RowCache:
    cache, generator = RowCache([window]), torch.Generator().manual_seed(seed)
    cache.layers[0].update(*(torch.randn(rows, 2, columns, 4, generator=generator) for _ in range(2)))
    return cache


def kept(cache: RowCache, rows: Sequence[int] | None = None) -> list[Tensor]:
    found = cache.layers[0].kept()
    return [each.clone() if rows is None else each[list(rows)].clone() for each in found]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("own", [0, 2])
def test_rows_of_several_caches_join_with_nothing_but_zeros_before_the_shorter_ones(
    own: int, window: int | None
) -> None:
    cache = filled(own, 4, window, 0) if own else RowCache([window])
    parts = [(filled(3, 7, window, 1), [0, 2]), (filled(2, 2, window, 2), [0, 1]), (filled(1, 5, window, 3), [0])]
    expected = [*([kept(cache)] if own else []), *(kept(other, rows) for other, rows in parts)]
    cache.join(parts)
    assert cache.columns == 7
    found, first = kept(cache), 0
    assert len(found[0]) == own + 5
    for each in expected:
        for joined, before in zip(found, each, strict=True):
            rows, columns = joined[first : first + len(before)], before.shape[2]
            assert torch.equal(rows[:, :, -columns:], before)
            assert not rows[:, :, :-columns].any()
        first += len(each[0])


def test_a_row_that_joins_later_sees_zeros_where_longer_rows_have_left() -> None:
    """Columns that came free keep what the rows that left had written there, or nothing at all."""
    cache = filled(1, 3, None, 0)
    cache.join([(filled(1, 9, None, 1), [0])])
    cache.keep([0], 3)
    assert cache.columns == 3
    cache.join([(filled(2, 90, None, 2), [1, 0])])  # more columns than there is room for
    assert all(each.isfinite().all() for each in kept(cache))
    assert not cache.layers[0].kept()[0][0, :, :-3].any()


def test_under_autocast_keys_are_kept_in_the_16_bits_in_which_they_are_multiplied() -> None:
    model, cache = model_of("llama"), RowCache([None] * 3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            model(torch.tensor([[3, 1, 4]]), past_key_values=cache)
    assert {each.dtype for layer in cache.layers for each in layer.kept()} == {torch.bfloat16}
    assert cache.columns == 6
