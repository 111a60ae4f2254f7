"""Tests what stands for a gradient when two computations are compared."""

from __future__ import annotations

import pytest
import torch

from drivetrain.prove.trace import ROW, fingerprint

LARGE = torch.randn(2 * ROW + 7, generator=torch.Generator().manual_seed(0))


def test_the_norm_is_the_gradients() -> None:
    assert fingerprint("a", LARGE.view(1, -1))[0] == pytest.approx(float(LARGE.double().norm()), rel=1e-12)


def test_the_projection_sees_elements_and_rows_in_another_place() -> None:
    rows_swapped = torch.cat([LARGE[ROW : 2 * ROW], LARGE[:ROW], LARGE[2 * ROW :]])
    shifted = LARGE.roll(1)
    last_changed = torch.cat([LARGE[:-1], -LARGE[-1:]])
    found = {fingerprint("a", each)[1] for each in (LARGE, rows_swapped, shifted, last_changed)}
    assert len(found) == 4
    assert fingerprint("a", LARGE) == fingerprint("a", LARGE.clone()) != fingerprint("b", LARGE)
