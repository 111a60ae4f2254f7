"""Others' checkpoints as runs of ours: after three of their steps ours go on with the losses that theirs have."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.state import same
from tests.checkpoint.convert import scripts
from tests.checkpoint.convert.scripts import END, RATE, SAVED, fresh, plain, save_on_ranks, trained
from tests.ranks import RankPool

Command = Callable[..., tuple[int, str, str]]
GoesOn = Callable[..., list[float]]


def as_theirs(losses: list[float]) -> Any:
    return pytest.approx(losses, rel=1e-6)


@pytest.fixture(scope="module")
def on_ranks(
    ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[float]]]:
    """The folder of what FSDP and DeepSpeed saved on two ranks, and the losses that they had after it."""
    folder = tmp_path_factory.mktemp("theirs")
    return folder, ranks(2).run(save_on_ranks, folder)[0]


@pytest.mark.parametrize("name", ["fsdp", "zero2", "zero3"])
def test_what_two_ranks_saved_goes_on_with_their_losses(
    on_ranks: tuple[Path, dict[str, list[float]]], goes_on: GoesOn, name: str
) -> None:
    folder, losses = on_ranks
    assert goes_on(folder / name) == as_theirs(losses[name])


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_deepspeed_made_universal_goes_on_with_its_losses(
    on_ranks: tuple[Path, dict[str, list[float]]], goes_on: GoesOn, tmp_path: Path, stage: int
) -> None:
    from deepspeed.checkpoint import ds_to_universal

    folder, losses = on_ranks
    tag = (folder / f"zero{stage}" / "latest").read_text()
    universal = tmp_path / "universal" / f"{tag}_universal"
    names = ("input_folder", "output_folder", "num_extract_workers", "num_merge_workers")
    given = dict(zip(names, (str(folder / f"zero{stage}" / tag), str(universal), 1, 1), strict=True))
    flags = type("Arguments", (), {**given, "keep_temp_folder": False, "strict": True, "inject_missing_state": True})
    ds_to_universal.main(flags)
    assert goes_on(tmp_path / "universal") == as_theirs(losses[f"zero{stage}"])


@pytest.fixture
def accelerated(tmp_path: Path) -> Iterator[tuple[Path, list[float]]]:
    """Accelerate's folder, and the losses of the steps after it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    try:
        accelerator = Accelerator(cpu=True)
        model = fresh()
        model, optimizer = accelerator.prepare(model, scripts.adamw(model))
        for step in range(END):
            if step == SAVED:
                accelerator.save_state(str(tmp_path / "accelerate"))
            loss = scripts.loss_of(model, step)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        yield tmp_path / "accelerate", plain()[2]
    finally:
        AcceleratorState._reset_state(True)


def test_what_accelerate_saved_goes_on_with_its_losses(accelerated: tuple[Path, list[float]], goes_on: GoesOn) -> None:
    folder, losses = accelerated
    assert goes_on(folder) == as_theirs(losses)


def test_a_transformers_trainers_checkpoint_brings_step_and_moments(goes_on: GoesOn, tmp_path: Path) -> None:
    """The Trainer's files, of any model: what decays comes first in its optimizer."""
    model, optimizer, losses = plain()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": SAVED}))
    assert goes_on(tmp_path, "--from", "transformers") == as_theirs(losses)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchtitans_names_are_understood(goes_on: GoesOn, tmp_path: Path) -> None:
    """The model at the top, the optimizer flattened, the step in train_state, objects beside."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer, losses = plain()
    state = {
        **model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=scripts.FLAT),
        "train_state": {"step": torch.tensor(SAVED, dtype=torch.int32), "ntokens_seen": torch.tensor(7)},
        "dataloader": {"0": b"a pickle of theirs"},
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert goes_on(tmp_path / "theirs") == as_theirs(losses)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_what_any_version_of_python_wrote_is_read(goes_on: GoesOn, tmp_path: Path, module: str) -> None:
    """The metadata hold a path, whose class Python 3.13 names by a module that others do not have."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer, losses = plain()
    flat = get_optimizer_state_dict(model, optimizer, options=scripts.FLAT)
    state = {**model.state_dict(), "optimizer": flat, "train_state": {"step": torch.tensor(SAVED)}}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    metadata = tmp_path / "theirs" / ".metadata"
    as_text = pickle.dumps(pickle.loads(metadata.read_bytes()), protocol=2)
    renamed, count = re.subn(rb"cpathlib(\._local)?\nPosixPath\n", f"c{module}\nPosixPath\n".encode(), as_text)
    assert count
    metadata.write_bytes(renamed)
    assert goes_on(tmp_path / "theirs") == as_theirs(losses)


def test_compiled_and_wrapped_names_are_understood(goes_on: GoesOn, tmp_path: Path) -> None:
    model, optimizer, losses = plain()
    weights = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    assert goes_on(tmp_path) == as_theirs(losses)


def test_what_is_carried_is_exact_and_what_is_left_is_reported(
    accelerated: tuple[Path, list[float]], drivetrain: Command, run_file: Path, tmp_path: Path
) -> None:
    folder, _ = accelerated
    (folder / "scheduler.bin").write_bytes(b"")
    output = f"output={tmp_path / 'ours'}"
    given = (output, "lr=0.5", "loop.epochs=2")
    code, out, errors = drivetrain("checkpoint", "convert", str(folder), "--run", str(run_file), *given)
    assert code == 0
    assert "note loop.epochs was given: it takes the place of the run file's loop.steps (" in errors
    lines = dict(line.split("\t")[1::-1] for line in out.splitlines())
    assert lines == {
        "weights": "carried",
        "optimizer's states": "carried",
        "step": "carried",
        "arguments": "left",
        "scheduler.bin": "left",
        "position in the data": "left",
        "random states": "left",
    }
    assert f"lr {RATE} there, 0.5 here: the run file's hold" in out
    saved = load(tmp_path / "ours" / "checkpoints" / f"step-{SAVED:08d}")
    model, optimizer, _ = plain()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(saved["model"][name], tensor), name
    for parameter, state in optimizer.state.items():
        ours = saved["optimizer"]["state"][names[id(parameter)]]
        assert all(torch.equal(ours[key], value) for key, value in state.items())


def test_clipping_that_deepspeed_does_and_the_run_does_not_is_reported(
    drivetrain: Command, run: Path, run_file: Path, tmp_path: Path
) -> None:
    drivetrain("checkpoint", "convert", str(run), "--to", "deepspeed", "--output", str(tmp_path / "theirs"))
    file = tmp_path / "theirs" / "global_step6_universal" / "zero" / "optimizer_state.pt"
    torch.save({**torch.load(file), "clip_grad": 1.0}, file)
    output = f"output={tmp_path / 'ours'}"
    code, out, err = drivetrain("checkpoint", "convert", str(tmp_path / "theirs"), "--run", str(run_file), output)
    assert code == 0, err
    assert "left\tgradient clipping\tat 1 there, loop.max_grad_norm is not set here" in out
    saved, back = (load(folder / "checkpoints" / "step-00000006") for folder in (run, tmp_path / "ours"))
    assert same(saved["model"], back["model"])
    assert same(saved["optimizer"], back["optimizer"])


def test_an_optimizer_of_another_kind_begins_anew_and_it_is_reported(
    accelerated: tuple[Path, list[float]], drivetrain: Command, run_file: Path, tmp_path: Path
) -> None:
    sgd = ["optimizer.name=sgd", "optimizer.momentum=0.9", f"output={tmp_path / 'ours'}"]
    code, out, _ = drivetrain("checkpoint", "convert", str(accelerated[0]), "--run", str(run_file), *sgd)
    assert code == 0
    assert "left\toptimizer's states\tsgd needs momentum_buffer, and theirs are exp_avg, exp_avg_sq, step" in out
    code, _, err = drivetrain("train", str(run_file), *sgd, "--resume", "--quiet")
    assert code == 0, err


def test_weights_alone_are_a_start_at_the_step_that_is_given(
    accelerated: tuple[Path, list[float]], goes_on: GoesOn
) -> None:
    folder, _ = accelerated
    (folder / "optimizer.bin").unlink()
    model = fresh()
    trained(model, scripts.adamw(model), range(SAVED))
    assert goes_on(folder, "--step", "3") == as_theirs(trained(model, scripts.adamw(model), range(SAVED, END)))


def test_momentum_of_sgd_is_carried_over_by_position(
    drivetrain: Command, run_file: Path, tmp_path: Path, goes_on: GoesOn
) -> None:
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    trained(model, optimizer, range(SAVED))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    further = trained(model, optimizer, range(SAVED, END))
    del drivetrain, run_file
    options = ["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0"]
    assert goes_on(tmp_path, "--step", "3", *options) == as_theirs(further)


def test_a_run_that_has_checkpoints_is_not_written_into(
    accelerated: tuple[Path, list[float]], drivetrain: Command, run_file: Path, run: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(run, tmp_path / "copied")
    convert = ("checkpoint", "convert", str(accelerated[0]), "--run", str(run_file), f"output={copied}")
    code, _, err = drivetrain(*convert)
    assert code == 2
    assert "holds checkpoints already" in err
