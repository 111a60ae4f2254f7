"""Runs that learn from rewards, by the command line: what they leave, and a kill at any moment."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint.directory import load, newest_good
from drivetrain.checkpoint.state import same
from drivetrain.tracking.jsonl import read_events
from tests.tiny_language import LLAMA, write_lines
from tests.workloads.policy_cases import ROWS

ROOT = Path(__file__).resolve().parents[1]
Command = Callable[..., tuple[int, str, str]]


def run_file(folder: Path, steps: int = 4, **learning: Any) -> Path:
    asked = folder / "asked.txt"
    rewards = [{"use": "tests.rewards.scores:counted", "options": {"file": str(asked)}}]
    write_lines(folder / "rows.jsonl", ROWS * 3)
    learning = {"rewards": rewards, "answers": 3, "max_new_tokens": 8, "updates": 2, **learning}
    run = {
        "workload": {
            "type": "language_model",
            "stage": "grpo",
            "model": {"config": LLAMA},
            "data": {"train": str(folder / "rows.jsonl"), "template": "plain", "length": 24},
            "reinforcement": learning,
        },
        "batch_size": 4,
        "loop": {"steps": steps},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "evaluation": {"every_steps": steps},
        "checkpoints": {"every_steps": 3},
        "tracking": {"log_every": 1},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder / "run.yaml"


def test_a_run_reports_its_rewards_and_every_answer(drivetrain: Command, tmp_path: Path) -> None:
    code, out, err = drivetrain("check", str(run_file(tmp_path)))
    assert code == 0, err
    assert "steps of 4 prompts" in out
    code, _, err = drivetrain("train", str(tmp_path / "run.yaml"), "--quiet")
    assert code == 0, err
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    made = [each for each in events if each["event"] == "rollout"]
    assert [each["step"] for each in made] == [0, 2]
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 4 * 3
    for each in lines:
        assert each["reward"] == each["rewards"]["counted"] == len(each["answer"]) % 5 or "\ufffd" in each["answer"]
    first = [each["reward"] for each in lines if each["step"] == 0]
    assert made[0]["metrics"]["reward"] == pytest.approx(sum(first) / 12)
    [evaluated] = [each["metrics"] for each in events if each["event"] == "evaluation"]
    assert evaluated["loss"] == -evaluated["reward"] == -evaluated["reward_counted"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["seconds_by_part"]["answers"] > 0
    assert "data" not in report["seconds_by_part"]
    answers = report["answers"]
    assert (answers["first_reward"], answers["reward"]) == tuple(each["metrics"]["reward"] for each in made)
    code, _, err = drivetrain("predict", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "rows.csv"))
    assert code == 0, err
    assert "answer" in (tmp_path / "rows.csv").read_text().splitlines()[0]


def test_a_function_gets_columns_and_messages_of_each_row(drivetrain: Command, tmp_path: Path) -> None:
    """TRL's rows and its functions for messages; each answer's reward tells from which row its column came."""
    path = run_file(tmp_path, rewards={"use": "tests.rewards.scores:of_row", "messages": True})
    rows = [{"prompt": [{"role": "user", "content": f"say {n}"}], "answer": n, "level": 2 * n} for n in range(12)]
    write_lines(tmp_path / "rows.jsonl", rows)
    code, _, err = drivetrain("train", str(path), "--quiet", "workload.data.evaluation_fraction=0.25")
    assert code == 0, err
    for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines():
        each = json.loads(line)
        assert each["reward"] == 2 * int(each["prompt"].removeprefix("say ")) + len(each["answer"]) / 1000
    code, out, err = drivetrain("evaluate", str(path))
    assert code == 0, err
    assert json.loads(out)["metrics"]["reward"] >= 2


def test_a_column_of_a_later_data_set_is_known_however_long_the_first_is(
    drivetrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.workloads.judged_rows.LOOKED_AT", 2)
    path = run_file(tmp_path, rewards={"use": "tests.rewards.scores:by_level", "options": {"base": 1}})
    write_lines(tmp_path / "more.jsonl", [{"prompt": "say", "answer": "x", "level": 2}])
    sets = f"workload.data.train=[{tmp_path / 'rows.jsonl'}, {tmp_path / 'more.jsonl'}]"
    code, _, err = drivetrain("train", str(path), "--quiet", sets, "workload.data.evaluation_fraction=0")
    assert code == 0, err


@pytest.mark.parametrize(
    ("name", "why"), [("nothing", "scores has no nothing"), ("needs_more", "missing a required argument: 'solution'")]
)
def test_check_and_train_refuse_a_function_that_cannot_be_called_and_leave_no_folder(
    drivetrain: Command, tmp_path: Path, name: str, why: str
) -> None:
    path = run_file(tmp_path, rewards=["exact_match", f"tests.rewards.scores:{name}"])
    for verb in (("check",), ("train", "--quiet")):
        code, out, err = drivetrain(*verb, str(path))
        assert code == 2
        assert why in err
        assert "workload.reinforcement.rewards.1.use" in err
        assert "nothing would be refused" not in out
        assert not (tmp_path / "run").exists()


def test_a_reward_that_fails_always_ends_the_run_with_its_reason(drivetrain: Command, tmp_path: Path) -> None:
    path = run_file(tmp_path, rewards=[{"use": "regex", "options": {"pattern": "("}}])
    code, _, err = drivetrain("train", str(path), "--quiet")
    assert code == 1
    assert "the reward regex failed for all 12 answers" in err
    assert "train --resume goes on with the answers that came" in err
    page = tmp_path / "page.html"
    assert drivetrain("report", str(tmp_path / "run"), "--output", str(page))[0] == 0
    assert f"drivetrain train {tmp_path / 'run' / 'run.yaml'} --resume" in page.read_text()
    assert "drivetrain check" not in page.read_text()


def test_a_reward_that_fails_for_some_answers_is_noted_once_with_a_reason(drivetrain: Command, tmp_path: Path) -> None:
    code, _, err = drivetrain(
        "train", str(run_file(tmp_path, rewards="tests.rewards.scores:fails_for_short")), "--quiet"
    )
    assert code == 0, err
    [note] = [line for line in err.splitlines() if "the reward fails_for_short failed for" in line]
    assert re.search(
        r"failed for \d+ of 12 answers: ValueError: too short \(.*scores\.py, line \d+\)\. They teach nothing", note
    )


def test_a_function_that_returns_one_number_for_several_answers_is_noted_once(
    drivetrain: Command, tmp_path: Path
) -> None:
    code, _, err = drivetrain("train", str(run_file(tmp_path, rewards="tests.rewards.scores:one_alone")), "--quiet")
    assert code == 0, err
    assert err.count("the reward one_alone was asked again for each answer by itself") == 1
    assert "it returned 1 reward for 3 answers; return a list with a number for each" in err


def test_a_run_whose_rewards_apply_to_no_answer_of_its_evaluation_ends_well_with_a_warning(
    drivetrain: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_file(tmp_path, rewards=[{"use": "tests.rewards.scores:never"}])
    code, _, err = drivetrain("train", str(path), "--quiet", "evaluation.early_stopping={patience: 1}")
    assert code == 0, err
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    [evaluated] = [each for each in events if each["event"] == "evaluation"]
    assert sorted(evaluated["metrics"]) == ["answer_tokens", "truncated"]
    assert not evaluated["best"]
    assert any("never returned None for" in each["message"] for each in events if each["event"] == "warning")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["status"], report["steps"], report["best"]) == ("completed", 4, None)
    code, out, err = drivetrain("evaluate", str(path))
    assert code == 0, err
    assert sorted(json.loads(out)["metrics"]) == ["answer_tokens", "truncated"]
    assert "never returned None for" in caplog.text
    assert drivetrain("report", str(tmp_path / "run"))[0] == 0


def start(path: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "drivetrain", "train", str(path), "--quiet", *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.Popen(command, cwd=path.parent, env=environment)


@pytest.mark.slow
def test_killed_in_answers_and_in_updates_it_ends_with_the_same_bits_and_asks_no_reward_again(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole, killed = (run_file(folder, steps=40, passes=2) for folder in folders)
    assert start(whole).wait(300) == 0
    asked, dice, kills = folders[1] / "asked.txt", random.Random(3), 0
    process = start(killed)
    for wanted in (10, 40, 70, 100):
        while process.poll() is None and (not asked.exists() or len(asked.read_text().splitlines()) < wanted):
            time.sleep(0.02)
        time.sleep(dice.random() * 0.3)
        assert process.poll() is None, "the run ended before it was killed: make it longer"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        process = start(killed, "--resume")
    assert process.wait(300) == 0
    states = [load(newest_good(folder / "run" / "checkpoints")[0] or folder) for folder in folders]
    assert same(states[0]["model"], states[1]["model"])
    counts = [Counter((folder / "asked.txt").read_text().splitlines()) for folder in folders]
    again = sum((counts[1] - counts[0]).values())
    assert not counts[0] - counts[1]
    assert again <= kills * 3, "only of the call that a kill interrupted"
