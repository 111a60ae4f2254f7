from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.memory import transfers
from drivetrain.memory.transfers import MOST_AHEAD, Ahead, Later, on_host, sent

CPU = torch.device("cpu")


@contextmanager
def elsewhere() -> Iterator[None]:
    """Copies are other tensors than their originals, as on another device."""

    def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        del device
        return tensor.to(dtype, copy=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "_moved", moved)
        yield


def test_the_host_reads_what_it_sent_and_not_the_copy() -> None:
    with elsewhere():
        own = torch.arange(6).reshape(2, 3)
        copy = sent(own, CPU)
        copy.zero_()  # on the device alone
    assert on_host(copy).tolist() == own.tolist()
    assert on_host(torch.ones(2)).tolist() == [1, 1], "what was not sent is read itself"


def test_a_copy_in_another_dtype_is_no_longer_what_was_sent() -> None:
    with elsewhere():
        copy = sent(torch.tensor([0.1]), CPU, torch.float16)
    assert on_host(copy).tolist() == copy.tolist() != pytest.approx([0.1], abs=1e-6)


def test_another_view_of_the_same_numbers_is_read_on_the_host_too() -> None:
    """ZeRO-3 detaches what each layer gets. What lies elsewhere in the same memory is not the same."""
    gc.collect()
    known = len(transfers._SENT)
    with elsewhere():
        copy = sent(torch.arange(6).reshape(2, 3), CPU)
        copy.zero_()
    assert on_host(copy.detach()).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert on_host(copy.view_as(copy)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert on_host(copy[1:]).tolist() == [[0, 0, 0]]
    assert on_host(copy.T).tolist() == [[0, 0]] * 3
    again = copy.detach()
    del copy
    gc.collect()
    assert on_host(again).tolist() == [[0, 0, 0]] * 2, "what was sent is gone"
    assert len(transfers._SENT) == known


def test_originals_live_as_long_as_their_copies() -> None:
    known = len(transfers._ON_HOST)
    with elsewhere():
        copies = [sent(torch.zeros(3), CPU) for _ in range(5)]
    assert len(transfers._ON_HOST) == known + 5
    del copies
    gc.collect()
    assert len(transfers._ON_HOST) == known
    here = torch.zeros(3)
    assert sent(here, CPU) is here
    assert len(transfers._ON_HOST) == known, "on a CPU there is no copy"


def test_numbers_are_read_after_the_event_of_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Event:
        def synchronize(self) -> None:
            asked.append("waited")

    def fetched(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.clone(), Event()

    assert Later(torch.tensor([2.0, 3.0])).numbers() == [2.0, 3.0]
    monkeypatch.setattr(transfers, "_fetched", fetched)
    later = Later(torch.tensor([4.0]))
    assert not asked
    assert later.numbers() == [4.0]
    assert asked == ["waited"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what is done with a GPU's streams, which are played, in order."""
    done: list[str] = []

    class Stream:
        def __init__(self, *_: Any) -> None:
            self.name = "side"

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        done.append(f"on {stream.name}")
        yield
        done.append(f"off {stream.name}")

    def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        del device
        done.append("copy")
        return tensor.to(dtype, copy=True)

    main = Stream()
    main.name = "main"
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: done.append(f"kept for {stream.name}"))
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(transfers, "_moved", moved)
    return done


def test_a_batch_is_copied_beside_and_waited_for_where_it_is_used(gpu: list[str]) -> None:
    ahead, batch = Ahead(CPU), {"x": torch.ones(2), "n": torch.arange(2)}
    ahead.send(batch, torch.float16)
    ahead.send(batch, torch.float16)
    assert gpu == ["on side", "copy", "copy", "off side"], "once"
    gpu.clear()
    taken = ahead.take(batch)
    assert gpu == ["main waits for side", "kept for main", "kept for main"]
    assert taken is not None
    assert {name: tensor.dtype for name, tensor in taken.items()} == {"x": torch.float16, "n": torch.int64}
    assert on_host(taken["n"]).tolist() == [0, 1]
    assert ahead.take(batch) is None, "it is the taker's alone"


def test_batches_that_are_never_taken_are_let_go(gpu: list[str]) -> None:
    ahead, batches = Ahead(CPU), [{"x": torch.full((1,), float(number))} for number in range(MOST_AHEAD + 2)]
    for batch in batches:
        ahead.send(batch)
    assert [ahead.take(batch) is not None for batch in batches] == [False] * 2 + [True] * MOST_AHEAD
    assert gpu


def test_what_is_not_pinned_is_not_sent_ahead(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: False)
    ahead, batch = Ahead(CPU), {"x": torch.ones(2)}
    ahead.send(batch)
    assert ahead.take(batch) is None
    assert not gpu
