"""Meters around a step: what they report, and that no failure of theirs reaches the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from drivetrain.config.precision import PRECISIONS
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.measure import flops, memory, meters
from drivetrain.measure.memory import TensorPeak
from drivetrain.measure.meters import Meters
from drivetrain.measure.throughput import Stopwatch
from tests.tiny_workload import CPU

HEADS, GROUPS, LENGTH, WIDTH = 4, 2, 128, 16


class Held:
    def tensors(self) -> list[Tensor]:
        return []


def measured(work: Callable[[Tensor], Any], steps: int = 3) -> tuple[list[Any], dict[str, Any], list[str]]:
    """Returns what each of some steps gives, what was measured, and the warnings."""
    words: list[str] = []
    batch = MicroBatch({"x": torch.randn(2, 8, generator=torch.Generator().manual_seed(0))})
    found = []
    counting = Meters(CPU, PRECISIONS["fp32"], Held(), True, Stopwatch(torch.device("cpu")), words.append)
    with counting:
        for _ in range(steps):
            with counting.step([batch]):
                found.append(work(batch.tensors["x"]))
            counting.step_done(2)
    return found, counting.summary(Communicator()), words


def test_the_rate_has_the_step_that_is_under_way_and_counts_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point of the curve is written before its step's evaluation and its end."""
    now = 0.0
    monkeypatch.setattr(meters.time, "perf_counter", lambda: now)
    counting = Meters(CPU, PRECISIONS["fp32"], Held(), False, Stopwatch(torch.device("cpu")))
    rates = []
    with counting:
        for number in range(8):
            now += 2.0
            if number != 1:  # between two points
                rates.append(counting.recent_rate(10))
            with counting.part("evaluation"):
                now += 50.0
            now += 0.5  # is the next step's
            counting.step_done(10)
        measured = counting.summary(Communicator())["samples_per_second"]
    assert rates == pytest.approx([5.0, 20 / 5.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    assert counting.recent_rate(0) == 0, "there was no step"
    assert counting.samples == 80
    assert measured == pytest.approx(4.0)


def attended() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, LENGTH, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def block_mask() -> Any:
    def causal(batch: Tensor, head: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        del batch, head
        return at >= seen

    return create_block_mask(causal, 1, None, LENGTH, LENGTH, device="cpu")


def test_an_operator_that_takes_functions_runs_and_is_counted() -> None:
    """FlexAttention, uncompiled: an error under a dispatch mode that has no rule for such operators."""
    mask = block_mask()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        found, summary, words = measured(lambda _: flex_attention(*attended(), block_mask=mask, enable_gqa=True))
    assert all(torch.equal(each, found[0]) for each in found)
    assert summary["flops_per_sample"] == 2 * 2 * HEADS * LENGTH * LENGTH * WIDTH / 2, "two samples a step"
    assert words == []


@pytest.mark.parametrize(("ranks", "is_measured"), [("1", True), ("2", False)])
def test_where_memory_is_short_no_operator_is_looked_at_and_a_sentence_says_so(
    ranks: str, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank holds 0.3 of the machine's memory; looking would have autograd hold more of it for a step."""
    held = torch.empty(int(0.3 * CPU.memory_bytes), device="meta", dtype=torch.uint8)
    monkeypatch.setattr(Held, "tensors", lambda _: [held])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    layer = nn.Linear(8, 4)
    _, summary, words = measured(layer)
    assert (summary["flops_per_sample"] is not None) == is_measured
    assert [each.startswith("FLOPs, tensor memory and traffic are not measured") for each in words] == [True] * (
        not is_measured
    )


@pytest.mark.slow
def test_compiled_attention_runs_as_compiled_while_it_is_measured() -> None:
    mask, compiled = block_mask(), torch.compile(flex_attention)
    torch._dynamo.utils.counters.clear()
    found, summary, words = measured(lambda _: compiled(*attended(), block_mask=mask, enable_gqa=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "no second compilation"
    assert all(torch.equal(each, found[0]) for each in found)
    dense_scores = 4 * HEADS * LENGTH * LENGTH
    assert summary["peak_memory"]["tensor"] < dense_scores
    assert words == []


def failing(*_: Any, **__: Any) -> int:
    raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")


def test_a_failing_count_is_one_warning_and_a_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 4)
    expected, whole, _ = measured(layer)
    monkeypatch.setattr(flops, "formula_of", lambda _: failing)
    monkeypatch.setattr(memory, "peaks", failing)
    monkeypatch.setattr(meters, "matmul_rate", failing)
    found, summary, words = measured(layer)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for key in ("flops_per_sample", "flops_per_second", "matmul_flops_per_second"):
        assert whole[key] is None or whole[key] > 0
        assert summary[key] is None
    assert summary["peak_memory"].keys() == {"tensor"}
    assert len(words) == 3
    assert any(line.startswith("FLOPs could not be measured and is left out: AssertionError: sdpa") for line in words)


def test_an_error_of_the_step_itself_is_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "formula_of", lambda _: failing)

    def broken(_: Tensor) -> None:
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"):
        measured(broken)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_any_number_of_steps_has_its_tensor_peak(steps: int) -> None:
    _, summary, words = measured(lambda x: torch.ones(1000, 1000) + x.sum(), steps)
    assert summary["peak_memory"]["tensor"] >= 4_000_000
    assert summary["flops_per_sample"] is not None
    assert not words


@pytest.mark.parametrize(
    "made",
    [
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ],
)
@pytest.mark.parametrize("first_is_skipped", [False, True])
def test_the_tensor_peak_of_the_first_step_is_that_of_a_step_that_finds_the_optimizers_state(
    made: Any, first_is_skipped: bool
) -> None:
    """A first update may be skipped, as fp16's often is: its state then comes later."""

    def steps(count: int, looked_at: Callable[[int], AbstractContextManager[Any]], part: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 10))
        optimizer = made(model.parameters())
        held.tensors = lambda: [  # type: ignore[method-assign]
            *model.parameters(),
            *(value for state in optimizer.state.values() for value in state.values() if value is not None),
        ]
        for step in range(count):
            with looked_at(step):
                model(x).square().mean().backward()
                with part("optimizer"):
                    if step or not first_is_skipped:
                        optimizer.step()
                    optimizer.zero_grad()
        return held.tensors()

    held, x = Held(), torch.randn(8, 300)
    steady = TensorPeak()

    @contextmanager
    def last(step: int) -> Iterator[None]:
        with steady if step == 2 else nullcontext():
            if step == 2:
                steady.track([*held.tensors(), x])
            yield

    steps(3, last, lambda _: nullcontext())
    counting = Meters(CPU, PRECISIONS["fp32"], held, True, Stopwatch(torch.device("cpu")))

    @contextmanager
    def counted(_: int) -> Iterator[None]:
        with counting.step([MicroBatch({"x": x})]):
            yield
        counting.step_done(8)

    with counting:
        steps(3, counted, counting.part)
        found = counting.summary(Communicator())["peak_memory"]["tensor"]
    assert found == pytest.approx(steady.peak_bytes, rel=0.02)
