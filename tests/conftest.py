"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.ranks import RankPool

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


# nothing here is a timed test: a busy machine is no failure
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# a shell that starts the tests in the background has Ctrl-C ignored, also by all that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
