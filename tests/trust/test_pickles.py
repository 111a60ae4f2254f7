"""Pickled weights are refused in our words, with a command that makes safetensors of them; and nothing reads others."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import drivetrain
from drivetrain.errors import UserError
from drivetrain.trust import pickles
from tests.trust.stranger import Evil

SOURCE = Path(drivetrain.__file__).parent


class Own(OrderedDict[str, torch.Tensor]):
    """A script's own class of weights, as torch.save keeps it."""


def calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    """The file and node of every call of these names."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(names):
                yield file.relative_to(SOURCE).as_posix(), node


def test_the_command_in_the_message_makes_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "a model's" / "pytorch_model.bin"
    file.parent.mkdir()
    shared = torch.arange(6.0)
    torch.save(Own(first=shared.view(2, 3).t(), second=shared), file)
    with pytest.raises(UserError, match=r"test_pickles\.Own") as caught:
        pickles.load(file, are_weights=True)
    [reported] = caught.value.problems
    assert "only where you trust their source" in reported.fix
    _, *words = shlex.split(reported.fix[reported.fix.index("python -c") :])
    command = [sys.executable, *words]
    subprocess.run(command, check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}, timeout=120)
    made = load_file(file.with_name("model.safetensors"))
    assert torch.equal(made["first"], shared.view(2, 3).t())
    assert torch.equal(made["second"], shared)


def test_what_is_no_weights_is_to_be_saved_again(tmp_path: Path, marker: Path) -> None:
    torch.save({"state": Evil(marker)}, tmp_path / "optimizer.pt")
    with pytest.raises(UserError, match=r"optimizer.pt holds more .*posix.mkdir.*\n *save it again") as caught:
        pickles.load(tmp_path / "optimizer.pt")
    assert "weights_only" not in str(caught.value)
    assert not marker.exists()


def test_a_pickle_that_torch_did_not_write_is_reported_as_one(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"\x80\x04\x8c\x05posix\x94\x8c\x05mkdir\x94\x93\x94.")
    with pytest.raises(UserError, match=r"a pickle that torch\.save did not write"):
        pickles.load(tmp_path / "x.pt")


def test_torchs_files_are_read_in_one_place_and_with_restraint() -> None:
    [(file, call)] = calls("torch.load")
    assert file == "trust/pickles.py"
    assert re.search(r"weights_only=True", ast.unparse(call))


def test_every_call_that_could_bring_code_says_whether_it_may() -> None:
    """Transformers asks at the terminal where the argument is left out."""
    found = [(file, call) for file, call in calls("from_pretrained", "auto.from_config")]
    found = [(file, call) for file, call in found if "PeftConfig" not in ast.unparse(call)]  # of JSON alone
    assert len(found) >= 4
    for file, call in found:
        assert "trust_remote_code" in {word.arg for word in call.keywords}, f"{file}: {ast.unparse(call)}"
    for file, call in calls("load_dataset"):
        assert "without_code(datasets)" in ast.unparse(call), f"{file}: {ast.unparse(call)}"
    assert not [file for file, call in calls("input") if ast.unparse(call.func) == "input"]
