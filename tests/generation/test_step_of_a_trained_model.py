"""A model that trains, as a run builds it, gives its answers by the short step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.generation.local_forward import LocalForward, stores_of
from drivetrain.generation.sampling import Choice
from drivetrain.generation.short_step import ShortStep, short_step_of
from drivetrain.models.swiglu import RecomputedSiLU, keep_silu
from tests.tiny_language import ROWS, workload


def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the rows of each short step."""
    found: list[int] = []
    usual = ShortStep.__call__

    def counted(step: ShortStep, cache: Any, tokens: Tensor, *others: Any) -> Tensor:
        found.append(len(tokens))
        return usual(step, cache, tokens, *others)

    monkeypatch.setattr(ShortStep, "__call__", counted)
    return found


def logits_after(model: Any, forward: LocalForward, prompts: list[list[int]], tokens: list[list[int]]) -> Tensor:
    """Returns the logits behind the prompts and tokens that go on with them, made step by step."""
    found: list[Tensor] = []

    def see(logits: Tensor) -> list[Choice]:
        found.append(logits)
        return [Choice(0)] * len(logits)

    store = stores_of(forward, model.eval())(forward)
    store.start(prompts, see)
    for each in tokens:
        store.next(each, see)
    return found[-1]


def test_a_model_of_a_run_gives_answers_by_its_short_step_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that learns from its answers: it takes the step before its first update, and behind it."""
    work, counted = workload(tmp_path, ROWS), taken(monkeypatch)
    model: Any = work.build_model()
    batch = work.collate([work.train.load(number, 0) for number in range(2)])
    assert sum(isinstance(each, RecomputedSiLU) for each in model.modules()) == len(model.model.layers)
    forward, rows = LocalForward(model), torch.tensor([[5, 6, 7, 11, 13], [8, 9, 10, 12, 14]])
    seen: list[Tensor] = []
    for _ in range(2):
        seen.append(logits_after(model, forward, rows[:, :3].tolist(), rows[:, 3:].T.tolist()))
        assert counted[-2:] == [2, 2]
        with torch.no_grad():
            expected = model(input_ids=rows, use_cache=False).logits[:, -1]
        torch.testing.assert_close(seen[-1], expected, rtol=1e-4, atol=1e-5)
        counted.clear()
        work.loss_sum(model.train(), batch).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.allclose(seen[0], seen[1])
    keep_silu(model)
    assert short_step_of(model.eval()) is not None
