"""Steps in buffers of fixed sizes, which a GPU records as CUDA graphs. On a CPU a stand-in repeats the pass itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.generation.cache import RowCache, windows_of
from drivetrain.generation.local_forward import LocalForward, fixed_steps_agree
from drivetrain.generation.recorded_steps import RecordedSteps, recorded_on_gpu
from drivetrain.generation.requests import Request, Sampling
from tests.device import chosen_device
from tests.generation.small_models import generator_of, model_of, prompts
from tests.generation.test_answers import compared


class Recorder:
    """Counts what is recorded and repeated. wrong_from: number of the repetition from which logits are others."""

    def __init__(self, wrong_from: int | None = None) -> None:
        self.recorded = self.repeated = 0
        self._wrong_from = wrong_from

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.recorded += 1
        found = torch.zeros_like(work())

        def repeat() -> None:
            self.repeated += 1
            wrong = self._wrong_from is not None and self.repeated >= self._wrong_from
            found.copy_(work() * (-1 if wrong else 1))

        return repeat, found


def steps_of(record: Any, cells: int = 10**6) -> RecordedSteps:
    return RecordedSteps(cells, 1e-4, record)


def requests(count: int = 12) -> list[Request]:
    """Returns requests of uneven prompts and answers, which join and leave in turn."""
    return [Request(ids, 5 + 3 * place) for place, ids in enumerate(prompts(count))]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_answers_of_recorded_steps_are_those_of_transformers(kind: str) -> None:
    model, record = model_of(kind), Recorder()
    with closing(generator_of(model, recorded=steps_of(record))) as generator:
        found = generator.answers(requests())
    assert compared(found, requests(), model) <= 1
    assert 0 < record.recorded < 8
    assert record.repeated > 40


@torch.no_grad()
def test_under_autocast_a_step_in_fixed_buffers_agrees_with_whole_sequences() -> None:
    """Rotated keys come in fp32 there, and are kept in 16 bits."""
    model = model_of("llama")
    windows = windows_of(model.config)
    assert windows is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert fixed_steps_agree(LocalForward(model), model, windows)


def test_buffers_serve_the_next_batch_and_what_was_in_them_is_not_seen() -> None:
    model, record = model_of("llama"), Recorder()
    wanted = requests(4)
    with closing(generator_of(model, recorded=steps_of(record))) as generator:
        first = generator.answers(wanted)
        count = record.recorded
        again = generator.answers(wanted)
        assert record.recorded == count
        assert [each.tokens for each in again] == [each.tokens for each in first]
        assert compared(generator.answers(requests(3)), requests(3), model) == 0


def test_a_full_buffer_is_left_for_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.generation.recorded_steps.LEAST_COLUMNS", 8)
    model, record = model_of("llama"), Recorder()
    wanted = [Request(ids, 40) for ids in prompts(3, longest=4)]
    with closing(generator_of(model, recorded=steps_of(record))) as generator:
        assert compared(generator.answers(wanted), wanted, model) <= 1
    assert record.recorded >= 3


def test_without_room_for_buffers_steps_are_taken_one_by_one() -> None:
    model, record = model_of("llama"), Recorder()
    with closing(generator_of(model, recorded=steps_of(record, cells=4 * 64))) as generator:
        found = generator.answers(requests())
    assert compared(found, requests(), model) <= 1
    assert record.recorded <= 1  # 2 rows of 128 columns fit, 4 do not


def test_all_buffers_together_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.generation.recorded_steps.LEAST_COLUMNS", 8)
    steps, largest = steps_of(Recorder(), cells=300), 0
    model = model_of("llama")
    forward = model.forward

    def watched(*args: Any, **how: Any) -> Any:
        nonlocal largest
        largest = max(largest, steps._held())
        return forward(*args, **how)

    with closing(generator_of(model, recorded=steps)) as generator:
        model.forward = watched
        generator.answers(requests(6))
    assert 0 < largest <= 300  # 4 rows of 32 columns and then of 64 were 384


def test_two_batches_at_once_have_buffers_of_their_own() -> None:
    steps, caches = steps_of(Recorder()), [filled(seed) for seed in (0, 1)]
    found = [steps.of(cache, 1) for cache in caches]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] is not found[1]
    assert steps.of(caches[0], 1) is found[0]
    before = found[1]
    del caches[1], found[1]
    third = filled(2)
    kept = third.layers[0].kept()[0].clone()
    assert steps.of(third, 1) is before
    assert torch.equal(third.layers[0].kept()[0], kept)


def filled(seed: int) -> RowCache:
    """A cache of one layer with a row of three columns."""
    cache = RowCache([None])
    generator = torch.Generator().manual_seed(seed)
    cache.layers[0].update(*(torch.randn(1, 2, 3, 4, generator=generator) for _ in range(2)))
    return cache


@pytest.mark.parametrize(("kind", "agrees"), [("llama", True), ("gpt2", True), ("falcon", False)])
def test_a_model_whose_fixed_steps_give_other_logits_is_not_recorded(kind: str, agrees: bool) -> None:
    """Falcon's distances (ALiBi) are counted by a mask of two dimensions, which a fixed step does not have."""
    model = model_of(kind)
    windows = windows_of(model.config)
    assert windows is not None
    assert fixed_steps_agree(LocalForward(model), model, windows) is agrees


@pytest.mark.parametrize("wrong_from", [1, 2])
def test_a_recording_that_gives_other_logits_is_given_up(wrong_from: int, caplog: pytest.LogCaptureFixture) -> None:
    """In its first step, or in the second, whose numbers are not those that were recorded."""
    model, record = model_of("llama"), Recorder(wrong_from)
    with caplog.at_level(logging.INFO), closing(generator_of(model, recorded=steps_of(record))) as generator:
        found = generator.answers(requests())
    assert compared(found, requests(), model) <= 1
    assert record.repeated == wrong_from
    assert "gave other logits" in caplog.text


def test_what_cannot_be_recorded_is_answered_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(work: Callable[[], Tensor]) -> Any:
        del work
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = model_of("llama")
    with caplog.at_level(logging.INFO), closing(generator_of(model, recorded=steps_of(refuses))) as generator:
        found = generator.answers(requests())
    assert compared(found, requests(), model) <= 1
    assert "not recorded as CUDA graphs: operation not permitted when stream is capturing" in caplog.text
    assert "and more" not in caplog.text


def test_a_sliding_window_is_not_recorded() -> None:
    model, record = model_of("mistral"), Recorder()
    with closing(generator_of(model, recorded=steps_of(record))) as generator:
        assert compared(generator.answers(requests(4)), requests(4), model) <= 1
    assert not record.recorded


def test_drawn_answers_are_the_same_with_and_without_recording() -> None:
    model = model_of("llama")
    wanted = [Request(ids, 12, Sampling(temperature=0.8, seed=3, draw=place)) for place, ids in enumerate(prompts(6))]
    with (
        closing(generator_of(model, recorded=steps_of(Recorder()))) as generator,
        closing(generator_of(model)) as plain,
    ):
        assert [each.tokens for each in generator.answers(wanted)] == [each.tokens for each in plain.answers(wanted)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU records graphs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_recorded_steps_give_the_answers_of_single_ones(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("llama").to(chosen_device(), dtype)
    with caplog.at_level(logging.INFO), closing(generator_of(model, recorded=steps_of(recorded_on_gpu))) as generator:
        found = generator.answers(requests())
        again = generator.answers(requests())
    with closing(generator_of(model)) as plain:
        expected = plain.answers(requests())
    assert "not recorded" not in caplog.text
    same = sum(one.tokens == other.tokens for one, other in zip(found, expected, strict=True))
    assert same >= (12 if dtype == torch.float32 else 6)  # where two logits are near, rounding decides
    assert [each.tokens for each in again] == [each.tokens for each in found]
