"""Saves every random generator's state, so that a resumed run draws what the uninterrupted one would have drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # all devices


def seed_rank(seed: int, rank: int) -> None:
    """Seeds another stream for each rank: equal dropout masks on all would be no dropout of the whole batch."""
    first, *_ = np.random.SeedSequence([seed, rank]).generate_state(1)
    seed_everything(int(first))


def rng_mark() -> tuple[Any, Any]:
    """Returns the state of torch's generators alone, in a microsecond; the others take a hundred. On GPUs only this
    process's own: the states of other visible ones are other ranks', and reading them would start those devices here.
    """
    return torch.get_rng_state(), [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []


def restore_mark(mark: tuple[Any, Any]) -> None:
    torch.set_rng_state(mark[0])
    if mark[1]:
        torch.cuda.set_rng_state(_own(mark[1]))


def _own(states: list[torch.Tensor]) -> torch.Tensor:
    """Returns this process's state among those of a checkpoint; earlier versions kept one for each visible device."""
    return states[0] if len(states) == 1 else states[torch.cuda.current_device() % len(states)]


def rng_state(mark: tuple[Any, Any] | None = None) -> dict[str, Any]:
    """Returns the states, JSON-able but for the tensors. mark: torch's generators at an earlier time."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    own, cuda = mark or rng_mark()
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": own,
        "cuda": cuda,
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    restore_mark((state["torch"], state["cuda"] if torch.cuda.is_available() else []))


def only_torch_drew(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Returns whether Python's and NumPy's generators are unchanged."""
    one, other = before["numpy"], after["numpy"]
    same = before["python"] == after["python"] and one["position"] == other["position"]
    return same and torch.equal(one["keys"], other["keys"])
