"""Defines what all tests share."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.device import VARIABLE, chosen_device, missing
from tests.ranks import RankPool
from tests.store_server import StoreServer
from tests.store_server import store_server as running_store

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


# nothing here is a timed test: a busy machine is no failure
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# a shell that starts the tests in the background has Ctrl-C ignored, also by all that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help=f"where tests with the `device` fixture run: cpu or cuda; left out, ${VARIABLE}")
    parser.addoption("--only-device", action="store_true", help="run the tests with the `device` fixture alone")


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--device")
    if given is not None:
        os.environ[VARIABLE] = given
    if why := missing(chosen_device()):
        raise pytest.UsageError(why)


# where tests start processes or take long; of what no prefix matches, a file takes seconds
LONG = (
    "tests/parity/", "tests/launch/", "tests/engines/", "tests/compare/", "tests/test_", "tests/optim/",
    "tests/inference/", "tests/prove/", "tests/api/", "tests/fuzz/", "tests/bench/", "tests/importing/test_running.py",
    "tests/export/", "tests/plan/", "tests/board/", "tests/generation/", "tests/models/test_quantised_base.py",
    "tests/checkpoint/test_directory_faults.py", "tests/runtime/test_lock.py", "tests/runtime/test_other_systems.py",
    "tests/importing/test_junk.py", "tests/data/language/test_long_tokens.py", "tests/models/test_fp8.py",
    "tests/data/language/test_stored_conversations.py", "tests/data/test_token_blocks.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of several processes: none ends with a long file while the others idle
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    if config.getoption("--only-device"):
        left = [item for item in items if "device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Sets the modules and the tests apart, over which Python's collector would pass all the time."""
    gc.freeze()


@pytest.fixture(scope="session")
def device() -> str:
    """ "cpu", or "cuda" where the tests are started with --device cuda."""
    return chosen_device()


@pytest.fixture
def on_device(device: str) -> Iterator[None]:
    """Tensors and modules that a test makes without naming a device lie on the tests' device."""
    with contextlib.nullcontext() if device == "cpu" else torch.device(device):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data are not at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """World size → the processes of that many ranks, which live as long as the session."""
    pools: dict[int, RankPool] = {}

    def of(world: int) -> RankPool:
        return pools.setdefault(world, RankPool(world))

    yield of
    for pool in pools.values():
        pool.close()


@pytest.fixture
def drivetrain(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process; gives exit code, stdout, and stderr with runs of white space folded."""
    from drivetrain.cli import main

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, " ".join(err.split())

    return call


@pytest.fixture(scope="session")
def store_server() -> Iterator[StoreServer]:
    """An S3 store on loopback; tests are skipped where moto or obstore is not installed."""
    with running_store() as server:
        yield server


@pytest.fixture
def bucket(
    store_server: StoreServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> str:
    """The address of a bucket of this test's own, which the environment has the credentials of; the cache of what is
    fetched is the test's own too."""
    for name, value in {**store_server.variables, "XDG_CACHE_HOME": str(tmp_path / "user-cache")}.items():
        monkeypatch.setenv(name, value)
    return store_server.make(f"b{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}")
