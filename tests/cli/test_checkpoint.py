"""`drivetrain checkpoint inspect` and `verify`: what they print of good and of damaged checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.cli import main

Command = Callable[..., tuple[int, str, str]]
RUN = """
workload: {{type: module, path: {example}}}
batch_size: 80
loop: {{steps: 4}}
optimizer: {{name: adamw, lr: 0.05, weight_decay: 0.1}}
evaluation: {{every_steps: 2}}
"""
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "linear.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    (folder / "run.yaml").write_text(RUN.format(example=EXAMPLE))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder / "run.yaml"), f"output={folder / 'out'}", "--quiet"])
    assert ended.value.code == 0
    return folder / "out"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "out"))


def test_inspect_tells_what_is_in_the_newest_checkpoint_of_a_run(drivetrain: Command, trained: Path) -> None:
    code, out, _ = drivetrain("checkpoint", "inspect", str(trained), "--json")
    assert code == 0
    found = json.loads(out)
    newest = trained / "checkpoints" / "step-00000004"
    assert (found["path"], found["step"], found["run"]) == (str(newest), 4, "run")
    assert (found["engine"], found["precision"], found["metric_name"]) == ("single", "fp32", "loss")
    assert found["progress"]["samples"] == 320
    assert found["progress"]["epochs"] == 0.4
    model = found["parts"]["model"]
    assert (model["tensors"], model["numbers"], model["bytes"]) == (2, 11, 44)
    assert model["by_dtype"] == {"float32": {"tensors": 2, "numbers": 11, "bytes": 44}}
    assert model["largest"][0] == {"name": "weight", "shape": [1, 10], "dtype": "float32", "bytes": 40}
    optimizer = found["optimizer"]
    assert optimizer["name"] == "adamw"
    assert [(group["parameters"], group["weight_decay"]) for group in optimizer["groups"]] == [(1, 0.1), (1, 0.0)]
    assert optimizer["states"]["exp_avg"] == {"float32": 2}
    assert found["random_streams"] == [0]
    assert found["files"] == {path.name: path.stat().st_size for path in newest.iterdir()}


def test_inspect_tells_the_same_to_the_eye(drivetrain: Command, trained: Path) -> None:
    code, out, _ = drivetrain("checkpoint", "inspect", str(trained / "checkpoints" / "step-00000002"))
    assert code == 0
    words = " ".join(out.split())
    assert "step 2, 160 samples, 0.2 epochs" in words
    assert "group 1 parameters: weight_decay 0.1, lr 0.05" in words
    assert "model: weight, 1 x 10, float32, 40 B" in words


def test_verify_says_of_each_checkpoint_whether_it_is_good(drivetrain: Command, run: Path) -> None:
    code, out, _ = drivetrain("checkpoint", "verify", str(run))
    root = run / "checkpoints"
    assert (code, out.splitlines()) == (0, [f"{root / name}: good" for name in ("step-00000002", "step-00000004")])
    bad = root / "step-00000002" / "model.safetensors"
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    code, out, _ = drivetrain("checkpoint", "verify", str(run))
    assert code == 1
    assert "step-00000002: model.safetensors does not have its checksum" in out
    assert f"{root / 'step-00000004'}: good" in out


def test_verify_tells_all_that_is_wrong_with_one(drivetrain: Command, run: Path) -> None:
    folder = run / "checkpoints" / "step-00000004"
    (folder / "optimizer.json").unlink()
    (folder / "training.json").write_text("")
    code, out, _ = drivetrain("checkpoint", "verify", str(folder))
    assert code == 1
    assert "optimizer.json is missing; training.json has 0 bytes" in out


def test_what_is_no_checkpoint_is_refused(drivetrain: Command, tmp_path: Path) -> None:
    for verb in ("inspect", "verify"):
        code, _, err = drivetrain("checkpoint", verb, str(tmp_path))
        assert code == 2
        assert "holds no checkpoint" in err


def test_inspect_names_a_file_that_cannot_be_read(drivetrain: Command, run: Path) -> None:
    folder = run / "checkpoints" / "step-00000004"
    (folder / "model.safetensors").write_bytes(b"short")
    code, _, err = drivetrain("checkpoint", "inspect", str(folder))
    assert code == 2
    assert "model.safetensors" in err


def test_inspect_says_that_it_passed_over_a_newer_checkpoint(drivetrain: Command, run: Path) -> None:
    newest = run / "checkpoints" / "step-00000004"
    (newest / "model.safetensors").write_bytes(b"short")
    code, out, err = drivetrain("checkpoint", "inspect", str(run), "--json")
    assert code == 0
    assert json.loads(out)["step"] == 2
    assert "skipped step-00000004: model.safetensors has 5 bytes" in " ".join(err.split())


@pytest.mark.parametrize("text", ["[]", '{"state": {"t": "zz"}}', "{"])
def test_inspect_refuses_a_tree_of_another_make(drivetrain: Command, run: Path, text: str) -> None:
    newest = run / "checkpoints" / "step-00000004"
    (newest / "optimizer.json").write_text(text)
    code, _, err = drivetrain("checkpoint", "inspect", str(newest))
    assert (code, "see drivetrain checkpoint verify" in err) == (2, True), err
