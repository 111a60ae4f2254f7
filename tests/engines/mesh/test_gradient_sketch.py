"""Sketches of gradients: sums over every FOLDS-th number, and the norm."""

from __future__ import annotations

import pytest
import torch

from drivetrain.engines.mesh.gradient_sketch import AT_ONCE, FOLDS, NOTHING, sketch


@pytest.mark.parametrize("count", [0, 1, FOLDS, AT_ONCE - 1, AT_ONCE, 2 * AT_ONCE + 5])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_sketch_holds_the_sums_of_every_so_manyth_number_and_the_norm(count: int, kind: torch.dtype) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(kind)
    whole = numbers.double()
    expected = [whole[fold::FOLDS].sum() for fold in range(FOLDS)] + [torch.linalg.vector_norm(whole)]
    torch.testing.assert_close(sketch(numbers), torch.stack(expected), rtol=1e-12, atol=1e-9)


def test_sketches_add_up_as_gradients_do_and_a_sparse_gradient_counts_as_it_is() -> None:
    one, other = torch.randn(2, 40, 7, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close((sketch(one) + sketch(other))[:-1], sketch(one + other)[:-1])
    assert torch.equal(sketch(one.to_sparse()), sketch(one))
    assert torch.equal(sketch(torch.zeros(3)), NOTHING)
