"""Native extensions: compiled once on a machine, even if a process is killed meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.deepspeed import native_build
from drivetrain.errors import UserError
from tests.ranks import RankPool
from tests.runtime.test_scratch import dead

SLOW_BUILD = """
import sys, time
from drivetrain.runtime.extension_builds import build_folder
from drivetrain.engines.deepspeed.native_build import built

def load():  # as torch.utils.cpp_extension.load goes about it
    folder = build_folder("slow_op")
    if (folder / "slow_op.so").exists():
        return print("loaded", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").touch()
    (folder / "lock").touch()
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    (folder / "slow_op.so").touch()
    (folder / "lock").unlink()

built("slow_op", load, patience=0.0)
"""


def started(seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_BUILD, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(autouse=True)
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.long
def test_a_build_that_was_killed_does_not_hang_the_next_start(extensions: Path) -> None:
    killed = started(600)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "building\n"
    killed.kill()
    killed.communicate()
    assert (extensions / "slow_op" / "lock").exists()
    out, words = started(0).communicate(timeout=60)
    assert out == "building\n"
    assert "interrupted build" in words
    assert "compiled slow_op in 0 s" in words
    assert not (extensions / "slow_op" / "lock").exists()


@pytest.mark.long
def test_ranks_that_start_together_compile_once_and_a_later_start_not_at_all() -> None:
    together = [child.communicate(timeout=60) for child in [started(1.0), started(1.0)]]
    assert sorted(out for out, _ in together) == ["building\n", "loaded\n"]
    out, words = started(0).communicate(timeout=60)
    assert (out, words) == ("loaded\n", "")


def test_what_does_not_compile_is_reported_with_the_compilers_words() -> None:
    def load() -> None:
        raise RuntimeError("Error building extension: libaio.h: No such file")

    with pytest.raises(UserError, match=r"libaio\.h: No such file"):
        native_build.built("broken_op", load)


def test_a_swap_folder_takes_away_what_a_killed_run_left_on_the_disk(tmp_path: Path) -> None:
    disk = tmp_path / "new" / "disk"
    disk.mkdir(parents=True)
    left = dead(disk)
    swap = native_build.swap_folder(disk, Communicator())
    assert not left.exists()
    assert swap.path.parent == disk
    (swap.path / "zero_stage_3").mkdir()
    swap.close()
    assert list(disk.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"engine.nvme_path: cannot be written"):
        native_build.swap_folder(tmp_path / "file" / "disk", Communicator())


def swapped(disk: Path) -> list[bool]:
    """Returns whether the folder of two ranks is there after each of them closes it in turn."""
    ranks, there = Communicator(), []
    swap = native_build.swap_folder(disk, ranks)
    (swap.path / str(ranks.rank)).write_text("x")
    for turn in range(ranks.world):
        ranks.all_gather(None)
        if ranks.rank == turn:
            swap.close()
        ranks.all_gather(None)
        there.append(swap.path.exists())
    return there


def test_ranks_share_a_swap_folder_which_the_last_one_deletes(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    assert ranks(2).run(swapped, tmp_path / "disk") == [[True, False]] * 2
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_run_on_the_cpu_is_not_moved_to_where_an_earlier_one_of_its_process_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.accelerator import get_accelerator, real_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # as such a run sets it
    monkeypatch.setattr(real_accelerator, "ds_accelerator", CUDA_Accelerator())
    native_build._choose_device_anew("cpu")
    assert get_accelerator().device_name() == "cpu"
    chosen = get_accelerator()
    native_build._choose_device_anew("cpu")
    assert get_accelerator() is chosen
