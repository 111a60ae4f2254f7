"""docs/tutorial/first-run.md, followed from an empty folder: its files, its commands, and what they print."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorial" / "first-run.md"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?%?")


@dataclass
class Step:
    """Commands of the page in order, and the text that it says they print."""

    commands: list[str]
    printed: list[str]


def steps(folder: Path) -> list[Step]:
    """Reads the page from top to bottom. A file is written when its turn comes: run.yaml has two versions."""
    found: list[Step] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        if language in ("python", "yaml"):
            name = block.partition("\n")[0].removeprefix("# ")
            found.append(Step([f"write {name}"], [block]))
        elif language == "text":
            found[-1].printed = block.splitlines()
        else:
            found.append(Step(block.splitlines(), []))
    assert folder.is_dir()
    return found


def run(folder: Path, line: str) -> str:
    """Types a command; one that the page interrupts gets Ctrl-C once it has saved twice. Returns what it printed."""
    command, _, remark = line.partition("#")
    words = shlex.split(command)
    words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "drivetrain"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110", "PYTHONUNBUFFERED": "1"}
    log = folder / "printed.txt"
    with log.open("w") as printed:
        started = subprocess.Popen(words, cwd=folder, stdout=printed, stderr=subprocess.STDOUT, env=environment)
        try:
            if "Ctrl-C" in remark:
                wait_for(log, "step     60  saved")
                started.send_signal(signal.SIGINT)
            code = started.wait(400)
        finally:
            started.kill()
    assert code == (130 if "Ctrl-C" in remark else 2 if "exits with 2" in remark else 0), log.read_text()
    return log.read_text()


def wait_for(log: Path, text: str) -> None:
    end = time.monotonic() + 200
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def skeleton(line: str) -> str:
    """A line without its numbers, which vary from machine to machine, and without the width of its columns."""
    return " ".join(NUMBER.sub("#", line).replace("│", " ").replace("┃", " ").replace("(emulated)", "").split())


def results(line: str) -> list[float]:
    """The losses and accuracies that a line names."""
    return [float(value) for value in re.findall(r"(?:loss|accuracy)[ │]+(\d+\.\d+)", line)]


def is_printed(shown: str, lines: list[str]) -> bool:
    """Whether a line of the page was printed: the same words, and losses and accuracies that are near."""
    alike = [line for line in lines if skeleton(line) == skeleton(shown)]
    return any(results(line) == pytest.approx(results(shown), abs=0.05) for line in alike)


@pytest.mark.slow  # eight verbs, each a process that imports torch: one to three minutes
def test_each_command_of_the_tutorial_prints_what_the_page_shows(tmp_path: Path) -> None:
    typed = 0
    for step in steps(tmp_path):
        if step.commands[0].startswith("write "):
            (tmp_path / step.commands[0].removeprefix("write ")).write_text(step.printed[0])
            continue
        printed = "".join(run(tmp_path, line) for line in step.commands).splitlines()
        typed += len(step.commands)
        for shown in step.printed:
            if shown.startswith("Choose "):  # which row is quickest varies
                assert any(line.startswith(("Choose ", "No ")) for line in printed)
            elif shown not in ("...", ""):
                assert is_printed(shown, printed), f"{step.commands}: {shown}\n" + "\n".join(printed)
    assert typed == 10
    assert (tmp_path / "runs" / "run-compare" / "comparison.html").is_file()
