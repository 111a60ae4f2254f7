"""Runs Python that a model wrote where it can do no harm: a sandbox by bubblewrap, and limits by prlimit.

The program sees the interpreter and the system's libraries, read-only, and an empty folder of its own in memory. It has
no network, and no process but its own. What it prints goes nowhere. It has passed if, in time and after all tests, a
number that is drawn anew for it comes through a pipe of its own. (A program that looks for that number in the
interpreter's frames can find it: it deceives a reward, and harms nothing.)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MEBIBYTE = 2**20
FOLDER = "/box"
# a user without rights, as whom the program runs where root starts it: root has no limit of processes, and reads every
# file
NOBODY = 65534
NEEDED = {"bwrap": "bubblewrap", "prlimit": "util-linux"}
NEEDED_BY_ROOT = {"setpriv": "util-linux"}
# reads the program from its input, and runs it and its tests in one namespace, as one file would
RUNNER = """
import json, os, sys
given = json.loads(sys.stdin.read())
space = {"__name__": "__main__"}
exec(compile(given["code"], "answer.py", "exec"), space)
exec(compile(given["tests"], "tests.py", "exec"), space)
os.write(int(sys.argv[1]), given["passed"].encode())
"""


class NotIsolated(Exception):
    """Code cannot be isolated on this machine; the message says why."""


@dataclass(frozen=True)
class Limits:
    seconds: float = 5.0  # by the clock, and of processor time
    memory: int = 512  # MiB of each process
    processes: int = 16  # of this program; where root starts them, of all such programs together
    file_size: int = 8  # MiB of each file, and of all files together


def passes(code: str, tests: str, limits: Limits) -> bool:
    """Returns whether a program ends its tests without an error. Raises NotIsolated where it cannot be isolated."""
    return _run(code, tests, limits)[0]


def check_isolation(limits: Limits) -> None:
    """Raises NotIsolated where a program cannot be isolated, or where one that does nothing fails within the limits."""
    needed = {**NEEDED, **(NEEDED_BY_ROOT if os.geteuid() == 0 else {})}
    lacking = [name for name in needed if shutil.which(name) is None]
    if sys.platform != "linux" or lacking:
        packages = sorted({needed[name] for name in lacking})
        why = f"not on this machine: {', '.join(lacking)} (Debian: apt install {' '.join(packages)})"
        raise NotIsolated(why if sys.platform == "linux" else "only Linux has the namespaces for it")
    passed, errors = _run("", "", limits)
    if not passed:
        raise NotIsolated(
            f"a program that does nothing fails within the limits: {errors.strip()[-300:] or 'no message'}"
        )


def _run(code: str, tests: str, limits: Limits) -> tuple[bool, str]:
    """Returns whether the tests passed, and what the sandbox or the program wrote to stderr, up to 1 MiB."""
    passed = secrets.token_hex(16)
    given = json.dumps({"code": code, "tests": tests, "passed": passed}).encode()
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as answer, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [*_sandbox(limits), _python(), "-I", "-S", "-c", RUNNER, str(writing)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(writing,),
                env={},
            )
        finally:
            os.close(writing)
        try:
            process.communicate(given, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return False, f"it took more than {limits.seconds:g} s"
        finally:
            process.kill()  # with it all that the program started: they live in its namespace
            process.wait()
        errors.seek(0)
        return answer.read(len(passed)) == passed.encode(), errors.read(MEBIBYTE).decode(errors="replace")


def _python() -> str:
    """Returns the interpreter itself, not a virtual environment's link to it: the program gets no packages."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _sandbox(limits: Limits) -> list[str]:
    """Returns the words before those of the program."""
    is_root = os.geteuid() == 0
    words = [_found("bwrap"), "--die-with-parent", "--new-session", "--clearenv"]
    words += [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts")]
    # in a user namespace of its own making a program could mount folders in memory that no limit holds
    alone = ["--unshare-user", "--disable-userns"]
    words += [] if is_root else alone
    words += ["--unshare-cgroup-try", *_seen()]
    words += ["--perms", "1777", "--size", str(limits.file_size * MEBIBYTE), "--tmpfs", FOLDER, "--chdir", FOLDER]
    words += ["--setenv", "HOME", FOLDER, "--setenv", "PATH", "/usr/bin:/bin", "--remount-ro", "/"]
    if is_root:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--", _found("setpriv"), f"--reuid={NOBODY}"]
        words += [f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
        words += [_found("bwrap"), *alone, "--dev-bind", "/", "/"]
    words.append("--")
    seconds, memory = max(1, round(limits.seconds)), limits.memory * MEBIBYTE
    size = limits.file_size * MEBIBYTE
    return [
        *words,
        _found("prlimit"),
        *(f"--cpu={seconds}", f"--as={memory}", f"--nproc={limits.processes}", f"--fsize={size}", "--core=0"),
    ]


def _found(program: str) -> str:
    """Returns a program's path: the sandbox is started with an empty environment, in which no PATH says it."""
    return shutil.which(program) or program


def _seen() -> list[str]:
    """Returns the words for what the program sees of the files of this machine: nothing but libraries and the
    interpreter."""
    words = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for place in map(Path, ("/bin", "/sbin", "/lib", "/lib64")):
        if place.is_symlink():
            words += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            words += ["--ro-bind", str(place), str(place)]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        for folder in reversed(prefix.parents[:-1]):
            words += ["--perms", "0755", "--dir", str(folder)]  # empty but for the way to the next
        words += ["--ro-bind", str(prefix), str(prefix)]
    words += ["--dir", "/tmp"]  # empty and read-only: bwrap needs it where it runs once more inside
    return [*words, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
