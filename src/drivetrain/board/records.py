"""Defines what the files of the queue's entries hold, and an entry as it stands."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

TEXTS = "texts.txt"
State = Literal["queued", "running", "stopping", "completed", "interrupted", "failed", "refused", "cancelled", "lost"]
READS_TEXTS = "--data=-"  # a word by which a verb reads texts from its input
LIVE = ("queued", "running", "stopping")
TRAINING = ("train", "compare")  # verbs of which one at a time takes the CPU


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Asked(Record):
    """A request of a user. words: of the command line, after `drivetrain`. count: devices, of the kind `device`."""

    id: str
    digest: str  # of what was asked, to tell a repeated request from another one with its key
    verb: str
    run: str
    words: list[str]
    owner: str
    created: str
    device: Literal["cpu", "cuda"] = "cpu"
    count: int = 1
    wanted: list[str] | None = None  # devices by name; None: any that are free
    resume: bool = False


class Launch(Record):
    devices: list[str]
    time: float


class Claim(Record):
    """Who took the entry. process, created: of the keeper, by which it is found again; None: it was cancelled."""

    by: str
    time: str
    host: str = ""
    process: int | None = None
    created: float = 0.0
    devices: list[str] = []


class Stop(Record):
    """now: at once, without saving."""

    by: str
    time: str
    now: bool


class Ended(Record):
    """code: as a shell would show it; negative for the signal that ended the process. reason: why nothing started."""

    code: int
    time: str
    reason: str | None = None


class Entry(Record):
    """An entry as it stands."""

    asked: Asked
    state: State
    reason: str | None = None
    claim: Claim | None = None
    launch: Launch | None = None
    ended: Ended | None = None

    @property
    def id(self) -> str:
        return self.asked.id

    @property
    def command(self) -> str:
        """The line that one would type."""
        words = self.asked.words
        return shlex.join(["drivetrain", *words]) + (f" < {TEXTS}" if READS_TEXTS in words else "")

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def devices(self) -> list[str]:
        """The devices that it holds or will hold in a moment."""
        if not self.is_live:
            return []
        taken = self.claim or self.launch
        return [] if taken is None else taken.devices

    def as_dict(self) -> dict[str, Any]:
        asked, claim = self.asked, self.claim
        return {
            "id": self.id,
            "verb": asked.verb,
            "run": asked.run,
            "owner": asked.owner,
            "state": self.state,
            "reason": self.reason,
            "created": asked.created,
            "started": claim.time if claim and claim.process else None,
            "ended": self.ended.time if self.ended else None,
            "code": self.ended.code if self.ended else None,
            "devices": claim.devices if claim else [],
            "wanted": {"devices": asked.wanted, "count": asked.count, "kind": asked.device},
            "command": self.command,
            "resume": asked.resume,
        }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
