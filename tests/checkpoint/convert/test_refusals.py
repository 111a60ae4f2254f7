"""Tests that what cannot be converted is refused before anything is written, with what was found and what to do."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from drivetrain.checkpoint.convert import zero
from drivetrain.checkpoint.convert.foreign import Positions
from drivetrain.checkpoint.convert.optimizer_names import by_name
from drivetrain.checkpoint.convert.parameter_names import named, with_tied
from drivetrain.checkpoint.directory import load
from drivetrain.errors import UserError
from drivetrain.trust import pickles
from tests.checkpoint.convert.scripts import fresh, plain

Command = Callable[..., tuple[int, str, str]]


class Evil:
    """Writes a file when it is unpickled without restraint."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._file,)


class Colour(Enum):
    RED = 1


@pytest.fixture
def refused(drivetrain: Command, run_file: Path, tmp_path: Path) -> Callable[..., str]:
    """Another's folder → why it is not converted."""

    def call(folder: Path, *more: str) -> str:
        output = tmp_path / "refused"
        code, _, err = drivetrain(
            "checkpoint", "convert", str(folder), "--run", str(run_file), f"output={output}", *more
        )
        assert code == 2, err
        assert not (output / "checkpoints").exists()
        return err

    return call


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Accelerate's files of the small model."""
    model, optimizer, _ = plain()
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return folder


# --- what a folder is -------------------------------------------------------------------------------------------------


def test_a_folder_of_no_format_is_refused_with_what_is_in_it(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    err = refused(tmp_path)
    assert "of no format that is known (transformers, dcp, deepspeed, accelerate): it holds notes.txt" in err


def test_another_format_than_was_named_is_refused_with_what_it_looks_like(
    refused: Callable[..., str], theirs: Path
) -> None:
    assert "dcp was given" in (err := refused(theirs, "--from", "dcp"))
    assert "looks like accelerate: it holds model.safetensors, optimizer.bin" in err


def test_a_checkpoint_of_ours_is_to_be_resumed_and_not_converted(refused: Callable[..., str], run: Path) -> None:
    assert "is a checkpoint of this project" in refused(run / "checkpoints" / "step-00000006")


def test_a_folder_that_is_not_there_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "is no folder" in refused(tmp_path / "nowhere")


def test_a_tag_that_is_not_there_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step7")
    assert "names global_step7, which is not there" in refused(tmp_path)


# --- pickles ---------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_is_more_than_tensors_is_not_loaded(
    refused: Callable[..., str], theirs: Path, tmp_path: Path
) -> None:
    torch.save({"state": Evil(tmp_path / "owned"), "param_groups": []}, theirs / "optimizer.bin")
    assert "posix.mkdir): reading it could run code" in refused(theirs)
    assert not (tmp_path / "owned").exists()


def test_deepspeeds_files_are_read_with_restraint_before_its_tools_read_them(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    torch.save({"module": {}, "client": Evil(tmp_path / "owned")}, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert "reading it could run code" in refused(folder)
    assert not (tmp_path / "owned").exists()


def test_deepspeeds_tools_see_no_file_that_was_not_read_with_restraint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look for files of any ending and depth."""
    tag = tmp_path / "global_step3"
    (tag / "sub").mkdir(parents=True)
    known = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    for name in known:
        torch.save({"param_shapes": [{"first.bias": 3}]}, tag / name)
    for name in ("mp_rank_00_zz.bin", *(f"sub/{name}" for name in known)):
        torch.save(Evil(tmp_path / "owned"), tag / name)
    seen: list[Path] = []
    monkeypatch.setattr(zero, "_merged", lambda folder, _: seen.extend(folder.rglob("*")))
    zero._read(tag, ())
    assert sorted(path.name for path in seen) == known
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "..", "a\\b"])
@pytest.mark.parametrize("key", ["param_shapes", "param_slice_mappings"])
def test_a_parameters_name_does_not_leave_its_folder(tmp_path: Path, name: str, key: str) -> None:
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    states = {"optimizer_state_dict": {key: [{name: 1}]}}
    torch.save(states, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(UserError, match="the format makes a folder's name of it"):
        zero._read(tmp_path, ())


CUT: dict[str, Callable[[Path], object]] = {
    "no shards": lambda folder: [path.unlink() for path in folder.glob("*.distcp")],
    "a shard cut short": lambda folder: [os.truncate(path, 100) for path in folder.glob("*.distcp")],
    "metadata cut short": lambda folder: os.truncate(folder / ".metadata", 50),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("cut", CUT)
def test_a_folder_that_is_not_whole_is_refused_and_named(refused: Callable[..., str], tmp_path: Path, cut: str) -> None:
    dcp.save({"model": plain()[0].state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    CUT[cut](tmp_path / "dcp")
    err = refused(tmp_path / "dcp")
    assert "give a complete folder" in err or "copy or save it again" in err


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors.index.json"])
def test_weights_of_another_make_are_refused_and_named(refused: Callable[..., str], tmp_path: Path, name: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if name.endswith(".bin"):
        torch.save([1, 2], folder / name)
    else:
        (folder / name).write_text("{not json")
    assert "give a complete folder" in refused(folder)


def test_metadata_of_dcp_name_nothing_but_torchs_own_classes(refused: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    assert "it names posix.mkdir" in refused(folder)
    assert not (tmp_path / "owned").exists()


def test_what_stands_for_getattr_in_a_pickle_gives_members_of_enums_alone() -> None:
    assert pickles.member(Colour, "RED") is Colour.RED
    for kind, name in ((Colour, "__class__"), (Colour, "mro"), (torch, "load"), ("text", "upper")):
        with pytest.raises(pickle.UnpicklingError, match="no member of an enum"):
            pickles.member(kind, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_values_of_dcp_are_numbers_and_not_objects(refused: Callable[..., str], tmp_path: Path) -> None:
    state = {"model": fresh().state_dict(), "step": Evil(tmp_path / "owned")}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "step holds more than tensors and plain values" in refused(tmp_path / "dcp")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_file_that_is_cut_short_is_named(refused: Callable[..., str], theirs: Path, name: str) -> None:
    whole = (theirs / name).read_bytes()
    (theirs / name).write_bytes(whole[: len(whole) // 2])
    assert f"{name}cannotberead" in "".join(refused(theirs).split())  # long paths are broken anywhere


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_weights_of_another_model_are_refused_by_their_names(refused: Callable[..., str], tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 1))
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    err = refused(tmp_path)
    assert "first.bias missing there" in err
    assert "0.weight unknown here" in err


def test_an_optimizer_of_other_parameters_is_refused_and_can_be_left_out(
    refused: Callable[..., str], drivetrain: Command, run_file: Path, theirs: Path, tmp_path: Path
) -> None:
    small = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(small.parameters())
    small(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), theirs / "optimizer.bin")
    assert "in 1 group(s) of 2 parameters, and this model's 6 do not fit them" in refused(theirs)
    output = f"output={tmp_path / 'ours'}"
    given = ("checkpoint", "convert", str(theirs), "--run", str(run_file), output, "--weights-only", "--step", "3")
    code, out, err = drivetrain(*given)
    assert code == 0, err
    assert "left\toptimizer's states" in out


def test_a_step_that_no_checkpoint_states_is_asked_for(refused: Callable[..., str], theirs: Path) -> None:
    assert "--step" in refused(theirs, "--weights-only")


def test_a_run_file_that_no_machine_could_run_is_refused_first(refused: Callable[..., str], theirs: Path) -> None:
    assert "both were given" in refused(theirs, "batch_size=20", "batch_size_per_device=4")


def test_a_run_for_gpus_is_converted_where_there_are_none(
    drivetrain: Command, run_file: Path, theirs: Path, tmp_path: Path
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.save(scaler.state_dict(), theirs / "scaler.pt")
    elsewhere = ["device=cuda", "precision=fp16-mixed", "engine=fsdp", "processes=8", "nodes=2"]
    output = f"output={tmp_path / 'ours'}"
    code, out, err = drivetrain("checkpoint", "convert", str(theirs), "--run", str(run_file), output, *elsewhere)
    assert code == 0, err
    assert "carried\toptimizer's states" in out
    assert "carried\tloss scale\t1024" in out
    training = load(tmp_path / "ours" / "checkpoints" / "step-00000003")["training"]
    assert training["engine"]["scaler"]["scale"] == 1024.0
    assert training["order"]["batch_size"] == 20


def test_a_run_of_adapters_takes_pefts_folder_instead(refused: Callable[..., str], theirs: Path) -> None:
    assert "adapter.path" in refused(theirs, "adapter=lora")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--to", "safetensor", "-o", "new"], "known: transformers, dcp, deepspeed, accelerate"),
        (["--to", "dcp", "-o", "new", "--dtype", "bf16"], "with --to transformers"),
        (["--to", "dcp", "-o", "taken"], "is there already"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    drivetrain: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    code, _, err = drivetrain("checkpoint", "convert", str(run), *more)
    assert code == 2
    assert why in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_a_damaged_checkpoint_is_not_converted(drivetrain: Command, run: Path, tmp_path: Path) -> None:
    import shutil

    copied = shutil.copytree(run / "checkpoints" / "step-00000006", tmp_path / "step-00000006")
    (copied / "optimizer.json").write_text("{}")
    code, _, err = drivetrain("checkpoint", "convert", str(copied), "--to", "dcp", "-o", str(tmp_path / "theirs"))
    assert code == 2
    assert "optimizer.json has 2 bytes" in err


# --- names and numbers -----------------------------------------------------------------------------------------------


def test_states_that_could_be_of_two_orders_are_not_guessed() -> None:
    """A matrix that no decay is said of by its name, beside one of its shape."""
    shapes = {"a.weight": torch.Size([2, 2]), "norm.weight": torch.Size([2, 2])}
    state = {0: {"exp_avg": torch.zeros(2, 2)}, 1: {"exp_avg": torch.zeros(2, 2)}}
    with pytest.raises(UserError, match="several ways"):
        by_name(Positions(state, [1, 1]), shapes, [])


@given(st.permutations(["a", "b", "c", "d"]), st.integers(0, 4))
def test_any_split_that_this_run_itself_makes_comes_back(order: list[str], cut: int) -> None:
    shapes = {name: torch.Size([number + 1]) for number, name in enumerate("abcd")}
    own = [order[:cut], order[cut:]]
    optimizer = {number: {"exp_avg": torch.zeros(shapes[name])} for number, name in enumerate(order)}
    found = by_name(Positions(optimizer, [cut, 4 - cut]), shapes, own)
    assert {name: values["exp_avg"].shape for name, values in found.items()} == shapes


@pytest.mark.parametrize("before", ["", "module.", "model.", "app.model.", "_orig_mod.", "module._orig_mod."])
def test_what_stands_before_all_names_is_taken_off(before: str) -> None:
    wanted = ["model.embed.weight", "model.layers.0.weight", "head.weight"]
    assert named({before + name: name for name in wanted}, wanted) == {name: name for name in wanted}


def test_wrappers_within_a_name_are_taken_off() -> None:
    given = {"layers.0._checkpoint_wrapped_module.weight": 1, "_fsdp_wrapped_module.head._orig_mod.weight": 2}
    assert named(given, ["layers.0.weight", "head.weight"]) == {"layers.0.weight": 1, "head.weight": 2}


def test_a_tied_weight_is_found_under_its_other_name() -> None:
    shared = torch.ones(2)
    found = with_tied({"embed": torch.zeros(2)}, {"embed": shared, "head": shared, "other": torch.ones(2)})
    assert found.keys() == {"embed", "head"}


def test_codes_of_8_bits_are_reported_and_left(drivetrain: Command, tmp_path: Path) -> None:
    """A matrix that is large enough to have codes, and a vector that is not."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\n"
        "model = nn.Linear(64, 64)\nloss = nn.MSELoss()\n"
        "train_data = TensorDataset(torch.rand(8, 64), torch.rand(8, 64))\n"
    )
    run = {
        "workload": {"type": "module", "path": str(tmp_path / "net.py")},
        "batch_size": 4,
        "loop": {"steps": 1},
        "optimizer": {"name": "adamw8bit"},
        "output": str(tmp_path / "out"),
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    code, _, err = drivetrain("train", str(tmp_path / "run.yaml"), "--quiet")
    assert code == 0, err
    code, out, _ = drivetrain("checkpoint", "inspect", str(tmp_path / "out"), "--json")
    states = json.loads(out)["optimizer"]["states"]
    assert states["exp_avg"] == {"OptimState8bit: uint8 codes and scales": 1, "float32": 1}
    code, out, _ = drivetrain(
        "checkpoint", "convert", str(tmp_path / "out"), "--to", "dcp", "-o", str(tmp_path / "dcp")
    )
    assert code == 0
    assert "left\toptimizer's states\tof 1 parameters they are codes" in out
    assert "carried\toptimizer's states\tof 1 parameters" in out
