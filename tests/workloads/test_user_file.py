from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import UserError
from drivetrain.workloads.user_file import UserFile

WHOLE = "model = 1\ntrain_data = [1]\nloss = 2\n"


def user_file(folder: Path, text: str, **options: Any) -> UserFile:
    (folder / "mine.py").write_text(text)
    return UserFile(folder / "mine.py", options)


def problems(folder: Path, text: str, **options: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        user_file(folder, text, **options)
    return [str(problem) for problem in caught.value.problems]


def test_everything_that_is_missing_is_reported_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, "import math\nlayers = 3\n")
    assert [line.split(" defines no ")[1].split("\n")[0] for line in found] == [
        "model (or build_model)",
        "train_data",
        "loss (or loss_sum and count)",
    ]
    assert all("found: layers" in line for line in found)


def test_a_name_that_scripts_use_for_a_missing_one_is_recognised(tmp_path: Path) -> None:
    found = problems(tmp_path, "net = 1\ntrain_dataset = [1]\ncriterion = 2\n")
    assert [line.split("\n    ")[1] for line in found] == [
        "rename net to model",
        "rename train_dataset to train_data",
        "rename criterion to loss",
    ]


def test_names_that_nothing_reads_are_reported(tmp_path: Path) -> None:
    text = WHOLE + "val_data = [1]\nmetric = {}\noptimizer = 3\nhidden = 4\nimport torch as predicts\n"
    assert user_file(tmp_path, text).misnamed() == [
        "mine.py: metric is not read; did you mean metrics?",
        "mine.py: optimizer is not read: optimizer of the run file decides",
        "mine.py: val_data is not read; did you mean evaluation_data?",
    ]


def test_a_synonym_beside_the_real_name_is_a_name_like_any_other(tmp_path: Path) -> None:
    assert user_file(tmp_path, WHOLE + "dataset = [1, 2]\nnet = 3\n").misnamed() == []
    built = "class Model: ...\ndef build_model(): ...\ntrain_data = [1]\ndef loss_sum(o, t): ...\ndef count(t): ...\n"
    assert user_file(tmp_path, built + "criterion = 4\n").misnamed() == []


@pytest.mark.parametrize(("first", "second"), [("model", "build_model"), ("loss", "loss_sum")])
def test_two_names_for_one_thing_are_refused(tmp_path: Path, first: str, second: str) -> None:
    (found,) = problems(tmp_path, WHOLE + f"{second} = 1\ncount = 1\n")
    assert f"both {first} and {second}" in found


def test_an_option_that_no_function_accepts_is_refused(tmp_path: Path) -> None:
    text = "def model(width=1): ...\ndef train_data(size=2): ...\ndef loss(o, t): ...\n"
    found = problems(tmp_path, text, widht=3, colour="red")
    assert "workload.options.widht: no function of mine.py accepts it\n    did you mean width?" in found
    assert "workload.options.colour: no function of mine.py accepts it\n    they take: size, width" in found


def test_an_option_that_a_function_requires_is_asked_for(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "def model(width): ...\ntrain_data = [1]\nloss = 1\n")
    assert found.startswith("workload.options.width: mine.py: model() requires it")


BROKEN = {
    "a name": ("x = 1\ny = undefined\n", ["at line 2 (y = undefined)", "NameError: name 'undefined'"]),
    "syntax": ("x = 1\nmodel = nn.Linear(10, 1\n", ["at line 2 (model = nn.Linear(10, 1)", "SyntaxError"]),
    "deep in a library": ("import json\nx = json.loads('{')\n", ["at line 2 (x = json.loads('{'))", "JSONDecodeError"]),
    "a missing package": ("import no_such_package\n", ["at line 1", "No module named 'no_such_package'"]),
    "a script that ends": ("import sys\nsys.exit(3)\n", ["at line 2 (sys.exit(3))", "SystemExit: 3"]),
}


@pytest.mark.parametrize(("text", "words"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_fails_shows_its_own_line(tmp_path: Path, text: str, words: list[str]) -> None:
    (message,) = problems(tmp_path, text)
    assert "failed while it was read" in message
    assert all(part in message for part in words), message


def test_a_function_that_fails_shows_its_own_line(tmp_path: Path) -> None:
    file = user_file(tmp_path, "model = 1\nloss = 1\ndef train_data():\n    return 1 / 0\n")
    with pytest.raises(UserError, match=r"train_data\(\) failed at line 4 \(return 1 / 0\): ZeroDivisionError"):
        file.made("train_data")


def test_a_module_beside_the_file_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_mine.py").write_text("size = 7\n")
    text = "model = 1\nloss = 1\ndef train_data():\n    import beside_mine\n    return [0] * beside_mine.size\n"
    assert len(user_file(tmp_path, text).made("train_data")) == 7


def test_an_edit_within_a_second_that_keeps_the_size_is_read(tmp_path: Path) -> None:
    """Python's kept bytecode would be taken for current: it knows the file's size and the second of its change."""
    for digit in "1", "2":
        (tmp_path / "mine.py").write_text(WHOLE.replace("= 1", f"= {digit}"))
        os.utime(tmp_path / "mine.py", (1_000_000_000, 1_000_000_000))
        assert UserFile(tmp_path / "mine.py", {}).get("model") == int(digit)
