from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import transfers
from drivetrain.transfers import Later, on_host, sent

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
