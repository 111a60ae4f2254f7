"""The other end of server.py: starts runs of pytest there and waits for them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from bench.mutation import server


class Server:
    """One process; one run at a time."""

    def __init__(self, folder: Path, environment: dict[str, str], preloaded: Sequence[str], nice: int) -> None:
        self._process = subprocess.Popen(
            ["nice", "-n", str(nice), sys.executable, server.__file__, *preloaded],
            cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, bufsize=0,  # select sees each line
        )  # fmt: skip

    def start(self, arguments: Sequence[str], added: dict[str, str], output: Path) -> Forked:
        """Runs pytest with these arguments and additions to its environment."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arguments, added, str(output)]).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()), self._process.stdout)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Forked:
    """A run of pytest."""

    def __init__(self, pid: int, answers: IO[bytes]) -> None:
        self._pid, self._answers = pid, answers
        self._code: int | None = None

    def ended(self, seconds: float) -> int | None:
        """The exit code (negative: a signal), waited for this long; None if it still runs."""
        if self._code is None and select.select([self._answers], [], [], seconds)[0]:
            self._code = int(self._answers.readline() or -signal.SIGKILL)  # nothing: the server was ended
        return self._code

    def end(self) -> None:
        """Ends its process group."""
        while self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            self.ended(1)
