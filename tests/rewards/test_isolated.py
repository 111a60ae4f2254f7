"""Code that a model wrote: what it can do, and what it cannot."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from drivetrain.config.reinforcement import Reward
from drivetrain.errors import UserError
from drivetrain.rewards.isolated import Limits, NotIsolated, check_isolation, passes
from drivetrain.rewards.process import RewardProcess
from drivetrain.rewards.verifiers import code, program_of

QUICK = Limits(seconds=2.0, memory=256)


@pytest.fixture(scope="module", autouse=True)
def _isolates() -> None:
    try:
        check_isolation(Limits())
    except NotIsolated as error:
        pytest.skip(f"code cannot be isolated here: {error}")


def test_a_program_that_passes_its_tests_has_the_reward_and_one_that_fails_has_not() -> None:
    answers = [
        "So:\n```python\ndef twice(x):\n    return 2 * x\n```",
        "def twice(x): return x",
        "def twice(x: return",
        "",
    ]
    assert code(answers, ["assert twice(3) == 6"] * 4) == [1, 0, 0, 0]
    assert code(["x = 1"], [None]) == [None]
    assert code(["x = 1"], [None], tests="assert x == 1") == [1]
    assert code(["x = 1", "x = 2"], ["assert x < 2"] * 2, tests="y = x") == [1, 0]


def test_the_last_block_is_the_program() -> None:
    assert program_of("```\na\n```\n then ```py\nb\n```") == "b\n"
    assert program_of("just text") == "just text"


@pytest.mark.parametrize("ends", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"])
def test_a_program_that_ends_before_its_tests_has_failed(ends: str) -> None:
    assert not passes(ends, "assert False", QUICK)


def test_a_number_written_to_every_pipe_is_not_taken_for_the_end_of_the_tests() -> None:
    guess = "import os\nfor n in range(3, 64):\n  try: os.write(n, b'0' * 32)\n  except OSError: pass\nos._exit(0)"
    assert not passes(guess, "", QUICK)


def test_files_of_the_machine_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for folder in (tmp_path, secret.parent):
        folder.chmod(0o777)
    assert not passes(f"open({str(secret)!r}).read()", "", QUICK)
    assert passes("import os", f"assert not os.path.exists({str(secret)!r}) and os.listdir('.') == []", QUICK)
    assert passes("import os", f"assert not os.path.exists({str(Path.home() / '.bashrc')!r})", QUICK)
    assert passes(
        "import os", "assert not any(each in os.environ for each in ('HF_TOKEN', 'PYTHONPATH', 'USER'))", QUICK
    )


@pytest.mark.parametrize("place", ["/usr/x", "/x", "/dev/shm/x", "/tmp/x", "/etc/x"])
def test_nothing_can_be_written_outside_its_folder(place: str) -> None:
    assert not passes(f"open({place!r}, 'w').write('x')", "", QUICK)
    assert passes("open('x', 'w').write('x')", "assert open('x').read() == 'x'", QUICK)


@pytest.fixture
def visits() -> Iterator[tuple[int, list[object]]]:
    """The port of a server on loopback, and its visitors."""
    seen: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    visitor, address = server.accept()
                except TimeoutError:
                    continue
                visitor.close()
                seen.append(address)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], seen
        stop.set()
        thread.join()


def test_there_is_no_network(visits: tuple[int, list[object]]) -> None:
    port, seen = visits
    assert not passes(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", "", QUICK)
    assert not seen
    socket.create_connection(("127.0.0.1", port), 1).close()
    end = time.monotonic() + 10
    while not seen and time.monotonic() < end:
        time.sleep(0.05)
    assert seen, "the server does answer those outside"


def test_a_fork_bomb_ends_with_its_program() -> None:
    before = len(psutil.pids())
    bomb = "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)"
    assert not passes(bomb, "", QUICK)
    end = time.monotonic() + 10
    while len(psutil.pids()) > before + 10 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(psutil.pids()) <= before + 10
    count = "import os, time\nn = 0\ntry:\n  for n in range(200):\n    if os.fork() == 0: time.sleep(9); os._exit(0)\n"
    assert passes(f"{count}except OSError: pass", "assert n <= 16", QUICK)


@pytest.mark.parametrize(
    "harm",
    [
        "x = b'x' * (1 << 30)",
        "while True: pass",
        "import time; time.sleep(60)",
        "while True: print('x' * 10000)",
        "import sys\nwhile True: sys.stderr.write('x' * 10000)",
        "open('x', 'wb').write(b'x' * 20_000_000)",
        "for n in range(100): open(str(n), 'wb').write(b'x' * 1_000_000)",
        "import os; os.setuid(0)",
        "import ctypes; ctypes.CDLL(None).mount(b'x', b'/box', b'tmpfs', 0, 0) and 1 / 0",
    ],
    ids=["memory", "loop", "sleep", "output", "errors", "file", "files", "root", "mount"],
)
def test_harm_fails_in_time(harm: str) -> None:
    start = time.monotonic()
    assert not passes(harm, "", QUICK)
    assert time.monotonic() - start < 30


def test_a_signal_reaches_no_process_outside() -> None:
    with subprocess.Popen(["sleep", "300"]) as outside:
        try:
            aimed = f"import os\ntry: os.kill({outside.pid}, 9)\nexcept ProcessLookupError: hidden = True"
            assert passes(aimed, "assert hidden", QUICK)
            passes("import os\nfor each in (os.getppid(), -1): os.kill(each, 9)", "", QUICK)
            assert outside.poll() is None
        finally:
            outside.kill()


def test_a_program_makes_no_namespace_in_which_it_could_mount_memory_without_a_limit() -> None:
    new_user = 0x10000000  # CLONE_NEWUSER
    assert passes(f"import ctypes\nmade = ctypes.CDLL(None).unshare({new_user})", "assert made == -1", QUICK)


def test_limits_in_which_nothing_runs_are_refused_before_the_first_answer() -> None:
    process = RewardProcess(Reward(use="code", options={"memory": 1}), "workload.reinforcement.rewards.0")
    with pytest.raises(UserError, match="cannot be isolated here") as caught:
        process.start()
    process.close()
    assert caught.value.problems[0].field == "workload.reinforcement.rewards.0"


def test_a_machine_without_the_sandbox_is_refused_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotIsolated, match=r"bwrap.*apt install bubblewrap"):
        check_isolation(Limits())


def test_the_process_of_the_reward_runs_the_programs() -> None:
    process = RewardProcess(Reward(use="code"), "workload.reinforcement.rewards.0")
    try:
        found = process.values({"completions": ["x = 1", "x = 2"], "references": ["assert x == 1"] * 2}, 2)
    finally:
        process.close()
    assert found == [(1.0, None), (0.0, None)]
