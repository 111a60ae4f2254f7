"""Compares the ranks' software before they form a group, where a mismatch would hang or crash.

Each rank puts one short text into the store in which the ranks meet; the first one reads all and answers. NCCL itself
reports two versions of it only as an error of the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from drivetrain.errors import Problem, UserError
from drivetrain.measure.gpu_software import HAVE_TO_MATCH
from drivetrain.training.preflight import holders

ANSWER_SECONDS = 10  # for the others to read the answer of a first rank that then ends
FIX = "install the same everywhere; drivetrain doctor shows what is there"
Software = Mapping[str, str]


def agree(store: dist.Store, rank: int, world: int, own: Software) -> list[str]:
    """Returns warnings about GPUs and drivers that differ between the ranks, on the first rank alone.

    Raises UserError on all ranks if versions differ that have to match. store: the one in which the ranks meet.
    """
    store = dist.PrefixStore("software", store)
    store.set(str(rank), json.dumps(own))
    if rank == 0:
        everyone = [json.loads(store.get(str(number))) for number in range(world)]
        store.set("answer", json.dumps(differences(everyone)))
    answer: dict[str, list[str]] = json.loads(store.get("answer"))
    store.set(f"read {rank}", "")
    if answer["problems"]:
        if rank == 0:  # the store may end with this process
            with suppress(dist.DistError, RuntimeError):
                store.wait([f"read {number}" for number in range(world)], timedelta(seconds=ANSWER_SECONDS))
        raise UserError([Problem("versions", why, FIX) for why in answer["problems"]])
    return answer["warnings"] if rank == 0 else []


def differences(everyone: Sequence[Software]) -> dict[str, list[str]]:
    """Returns a sentence for each item that the ranks do not share: `problems` end the run, `warnings` do not.

    everyone: the values of each rank, in the order of the ranks.
    """
    found: dict[str, list[str]] = {"problems": [], "warnings": []}
    for name, why in holders(everyone).items():
        if name in HAVE_TO_MATCH:
            found["problems"].append(why)
        else:
            found["warnings"].append(f"{why}: the slowest rank sets the pace")
    return found
