"""vLLM or SGLang in the place of our own server: what is started, with programs of their names that show arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
SHOWS = """#!/bin/sh
echo "$@"
echo "key=$VLLM_API_KEY"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    return tmp_path / "mine"


def test_vllm_gets_the_model_its_name_and_where_to_listen(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(SHOWS)
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "VLLM_API_KEY": "a-key-of-the-tests"}
    command = [sys.executable, "-m", "drivetrain", "serve", str(model), "--backend", "vllm", "--port", "9"]
    done = subprocess.run([*command, "--host", "0.0.0.0"], env=environment, capture_output=True, text=True, check=True)
    given, key = done.stdout.splitlines()
    assert given == f"serve {model} --served-model-name mine --host 0.0.0.0 --port 9"
    assert key == "key=a-key-of-the-tests"
    assert "a-key-of-the-tests" not in done.stderr


def test_all_that_vllm_cannot_do_is_refused_at_once(
    drivetrain: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    given = ("--backend", "vllm", "--host", "0.0.0.0", "--requests-per-minute", "5", "--answers", "512", "--trust")
    code, _, shown = drivetrain("serve", str(model / "none"), *given)
    assert code == 2
    for why in (
        "--requests-per-minute: vLLM has no such option",
        "--answers: vLLM has no such option",
        "--trust: vLLM has no such option",
        "the program vllm is not installed here",
        "holds no config.json",
        "other machines reach 0.0.0.0, and there is no key",
    ):
        assert why in shown, shown
    assert "--checkpoint" not in shown


def test_sglang_gets_the_model_its_name_and_where_to_listen(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "sglang"
    program.write_text(SHOWS)
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "drivetrain", "serve", str(model), "--backend", "sglang", "--port", "9"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    given = done.stdout.splitlines()[0]
    assert given == f"serve --model-path {model} --served-model-name mine --host 127.0.0.1 --port 9"


def test_what_sglang_cannot_do_is_refused_at_once(
    drivetrain: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-the-tests")  # which is none of SGLang's
    given = ("--backend", "sglang", "--host", "0.0.0.0")
    code, _, shown = drivetrain("serve", str(model), *given, "--unix-socket", str(model / "socket"))
    assert code == 2
    assert "--unix-socket: SGLang has no such option" in shown
    assert "the program sglang is not installed here" in shown
    assert "--host" not in shown, "a socket is reached by nobody else"
    code, _, shown = drivetrain("serve", str(model), *given)
    assert code == 2
    assert "SGLang takes a key on its command line alone" in " ".join(shown.split())
