"""The place where the nodes of a run meet, and agree on the present attempt.

The first node keeps a store at the rendezvous over all restarts. Any other node that dies is missed only by the ranks.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drivetrain.config.run import RunConfig
from drivetrain.errors import RankError, RunError
from drivetrain.launch.job import Node

if TYPE_CHECKING:
    from torch.distributed import TCPStore

NUMBER, OVER, SMALLER = "drivetrain/attempt", "drivetrain/over", "drivetrain/smaller-after-"
FAILED = "drivetrain/failed-in-"
JOIN_SECONDS = 600  # a machine may come so much later than the first one
LAST_CALL_SECONDS = (60, 10)  # with min_nodes there, those that are still missing are waited for: at first, and again
SHARED_NODES = 16  # up to so many, each node reads what every other one reports of a hang
SETTLING_SECONDS = 3  # in which a node that lost its ranks to a mistake says that the run is over


class Meeting:
    def __init__(self, run: RunConfig, node: Node) -> None:
        """Raises RunError if no store answers at the rendezvous."""
        self._run, self._node = run, node
        self._number = 0
        self._moves: int | None = None  # of this node's ranks as last told; None: not yet in this attempt
        self._store: TCPStore | None = None
        if run.nodes > 1:
            with self._described():
                self._store = self._joined()
                self._number = int(self._store.compare_set(NUMBER, "", "0"))

    def settings(self) -> dict[str, Any]:
        """Returns the settings of torch elastic's rendezvous for this attempt."""
        if self._store is None:
            alone = {"min_nodes": 1, "max_nodes": 1, "run_id": str(uuid.uuid4())}
            return {**alone, "rdzv_endpoint": "localhost:0", "rdzv_configs": {}, "local_addr": "127.0.0.1"}
        last_call = LAST_CALL_SECONDS[min(self._number, 1)]
        return {
            "min_nodes": self._run.min_nodes or self._run.nodes,
            "max_nodes": self._run.nodes,
            "run_id": f"{self._run.name}-{self._number}",
            "rdzv_endpoint": self._node.rendezvous,
            "rdzv_configs": {
                "is_host": str(self._node.rank == 0),
                "join_timeout": JOIN_SECONDS,
                "last_call_timeout": last_call,
            },
            "local_addr": None,
        }

    def part(self) -> None:
        """Separates attempts, before the next one. Raises RankError if another node has ended the run."""
        if self._store is None:
            return
        time.sleep(SETTLING_SECONDS)
        self._moves = None
        with self._described():
            if self._store.check([OVER]):
                raise RankError("another node ended the run: its output has the reason")
            # the first node counts it up; the others read it
            self._number = int(self._store.compare_set(NUMBER, str(self._number), str(self._number + 1)))

    def try_smaller(self) -> None:
        """Tells the other nodes that their ranks were ended for smaller micro-batches."""
        if self._store is not None:
            with self._described():
                self._store.set(f"{SMALLER}{self._number}", "1")

    def tries_smaller(self) -> bool:
        """Returns whether another node ended this attempt for that; called when ranks died. False if the first node is
        gone: then the reason of the death is what to report."""
        if self._store is None:
            return False
        time.sleep(SETTLING_SECONDS)
        with suppress(RuntimeError):
            return bool(self._store.check([f"{SMALLER}{self._number}"]))
        return False

    @property
    def is_first(self) -> bool:
        return self._node.rank == 0

    def progress(self, moves: int) -> int:
        """Adds what this node's ranks have counted to the sum of all nodes in this attempt, and returns that sum. One
        call to the store, however many nodes there are. moves: of this node, since the attempt began."""
        if self._store is None:
            return moves
        with suppress(RuntimeError):  # the first node is gone, which the ranks notice
            if self._moves is None:
                self._moves = 0
                self._store.add(self._key("watching"), 1)
            added, self._moves = moves - self._moves, moves
            return int(self._store.add(self._key("moves"), added))
        return 0

    def rows(self, own: str, seconds: float) -> list[str]:
        """Sends this node's rows of a table and returns the other nodes', after waiting so long for them at the most.

        The first node gets all. Others get them where there are at most SHARED_NODES: of N nodes that all read all, the
        first one's store would send N x N messages.
        """
        found: list[str] = []
        if self._store is None:
            return found
        with suppress(RuntimeError):
            self._store.set(f"{self._key('rows')}-{self._node.rank}", own)
            sent = self._store.add(self._key("sent"), 1)
            if not self.reads_all:
                return found
            until, watching = time.monotonic() + seconds, self._store.add(self._key("watching"), 0)
            while sent < watching and time.monotonic() < until:
                time.sleep(0.5)
                sent = self._store.add(self._key("sent"), 0)
            others = (f"{self._key('rows')}-{node}" for node in range(self._run.nodes) if node != self._node.rank)
            found += [self._store.get(key).decode() for key in others if self._store.check([key])]
        return found

    @property
    def reads_all(self) -> bool:
        """Returns whether this node reads the rows of all others."""
        return self.is_first or self._run.nodes <= SHARED_NODES

    def tell_hang(self, reason: str) -> None:
        """Tells all nodes why the ranks of this attempt were ended; the first reason stays."""
        self._tell_once(self._key("hang"), reason)

    def hang(self) -> str:
        """Returns why a node has ended its ranks in this attempt; "" where none did."""
        return self._told(self._key("hang"))

    def tell_failure(self, rank: str) -> None:
        """Tells all nodes that a rank of this attempt has failed. rank: its name, such as "rank 3"; the first stays."""
        self._tell_once(f"{FAILED}{self._number}", rank)

    def failure(self) -> str:
        """Returns the name of a rank that failed in this attempt, on any node; "" where none is known."""
        return self._told(f"{FAILED}{self._number}")

    def _tell_once(self, key: str, text: str) -> None:
        if self._store is not None:
            with suppress(RuntimeError):  # the first node is gone, which the ranks notice
                self._store.compare_set(key, "", text)

    def _told(self, key: str) -> str:
        if self._store is None:
            return ""
        with suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""

    def _key(self, what: str) -> str:
        return f"drivetrain/{what}-{self._number}"

    def goes_on_without(self) -> bool:
        """Returns whether the others may go on when this node leaves; none can without the first one's store."""
        return not self.is_first and (self._run.min_nodes or self._run.nodes) < self._run.nodes

    def give_up(self) -> None:
        """Records that the others need not try again."""
        if self._store is not None:
            try:
                self._store.set(OVER, "1")
            except RuntimeError:
                return  # the first node is gone, and the run with it

    def _joined(self) -> TCPStore:
        from torch.distributed import TCPStore

        host, port = self._address()
        is_first, patience = self._node.rank == 0, timedelta(seconds=JOIN_SECONDS)
        return TCPStore(host, port, is_master=is_first, multi_tenant=True, timeout=patience)

    def _address(self) -> tuple[str, int]:
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        return parse_rendezvous_endpoint(self._node.rendezvous, default_port=-1)

    @contextmanager
    def _described(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch's errors of network and stores are RuntimeErrors
            if isinstance(error, RankError):
                raise
            raise RunError(self.unreachable(error)) from error

    def unreachable(self, error: Exception) -> str:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        if self._run.nodes == 1:
            return f"the ranks of this machine could not meet: {first}"
        return (
            f"node {self._node.rank} could not meet the others at {self._node.rendezvous} ({first}). Look whether node "
            "0 is running, whether the name leads to it from here, and whether a firewall lets the port pass; if it is "
            "gone, start all nodes again with --resume"
        )
