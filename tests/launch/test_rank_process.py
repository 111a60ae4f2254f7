"""A rank that an actor holds is the rank that torch elastic would start, and leaves the same word of its end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drivetrain.checkpoint.directory import steps
from drivetrain.config.load import load
from drivetrain.launch.job import Job
from drivetrain.launch.outcome import RankOutcome
from drivetrain.launch.rank_process import RankProcess, Seen
from drivetrain.runtime.heartbeat import read
from tests.launch.test_start import command, prepared


@pytest.fixture
def held() -> Iterator[RankProcess]:
    found = RankProcess()
    yield found
    found.close()


def started(held: RankProcess, folder: Path, *words: str) -> None:
    run, problems = load(folder / "run.yaml", ["engine=single", "output=held", *words])
    assert run is not None, problems
    run = run.model_copy(update={"output": str(folder / "held")})
    _, port = held.place("127.0.0.1")
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    attempt = {"most": 0, "restarts": [], "reduction": None}
    held.start(Job(verb="train", run=run).model_dump_json(), 0.0, attempt, {}, ranks, str(folder))


def at_its_end(held: RankProcess) -> Seen:
    said, until = "", time.monotonic() + 300
    while True:
        seen = held.look()
        said += seen.said
        if seen.code is not None:
            return Seen(seen.code, said, seen.pulse, seen.outcome, seen.ended_before, seen.kept)
        assert time.monotonic() < until, said
        time.sleep(0.2)


def newest(run: Path) -> Path:
    return steps(run / "checkpoints")[-1] / "model.safetensors"


def outcome_of(seen: Seen) -> RankOutcome:
    assert seen.outcome is not None, seen.said
    return RankOutcome.model_validate_json(seen.outcome)


@pytest.mark.long
def test_a_held_rank_trains_as_the_command_does(held: RankProcess, tmp_path: Path) -> None:
    folder = prepared(tmp_path, "pass")
    started(held, folder)
    seen = at_its_end(held)
    assert seen.code == 0, seen.said
    assert outcome_of(seen).kind == "done"
    assert 0 <= seen.ended_before < 60
    assert set(seen.kept) == {"prepared", "elapsed.json"}, "which the next attempt has to know"
    subprocess.run(command("train", "run.yaml", "engine=single", "output=plain"), cwd=folder, check=True, timeout=300)
    [own, plain] = [load_file(newest(folder / name)) for name in ("held", "plain")]
    assert own.keys() == plain.keys()
    assert all(own[name].equal(plain[name]) for name in own)


def test_a_held_rank_that_fails_says_why(held: RankProcess, tmp_path: Path) -> None:
    started(held, prepared(tmp_path, "raise ValueError('this one broke')"))
    seen = at_its_end(held)
    assert seen.code == 1
    assert outcome_of(seen).message == "ValueError: this one broke"
    assert seen.pulse is not None


def test_a_held_rank_that_is_killed_leaves_no_word_but_its_code(held: RankProcess, tmp_path: Path) -> None:
    started(held, prepared(tmp_path, "time.sleep(600)"))
    until = time.monotonic() + 200
    while (pulse := held.look().pulse) is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    (tmp_path / "pulse").write_bytes(pulse)
    record = read(tmp_path / "pulse")
    assert record is not None
    assert record.rank == 0
    held.signal(signal.SIGKILL)
    seen = at_its_end(held)
    assert (seen.code, seen.outcome) == (-signal.SIGKILL, None)
