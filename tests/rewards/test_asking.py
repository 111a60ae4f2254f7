"""Rewards asked for in processes of their own: what they get, and what becomes of those that fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.config.reinforcement import Reward
from drivetrain.errors import UserError
from drivetrain.rewards.asking import AskedReward, Group, Scored
from drivetrain.workloads.rewarding import Rewarding
from tests.rewards import scores

ODD = ["fine", "raise", "exit", "crash", "hang", "nan", "none", "words"]
NO_FLOATS = ["huge", "longer than can be printed", "decimal", "complex", "nameless", "wordless", "fine"]


def asked(answers: Sequence[Sequence[str]], **given: Any) -> list[list[Scored]]:
    reward = AskedReward(Reward.model_validate(given), 0)
    found: dict[int, Sequence[Scored]] = {}
    groups = [Group("p", "r", texts, [[1]] * len(texts)) for texts in answers]
    reward.ask(list(enumerate(groups)), found.__setitem__)
    return [list(found[number]) for number in range(len(groups))]


def values(found: list[list[Scored]]) -> list[list[float | None]]:
    return [[each.value for each in group] for group in found]


def test_a_function_gets_what_it_names_and_may_print() -> None:
    assert values(asked([["ab", "abc"], ["a"]], use="tests.rewards.scores:short")) == [[-2, -3], [-1]]


def test_a_coroutine_is_awaited_with_its_options_by_several_processes() -> None:
    given = {"use": "tests.rewards.scores:later", "options": {"factor": 2.0}, "processes": 2}
    assert values(asked([["ab"], ["abc"], ["a"]], **given)) == [[4], [6], [2]]


def test_an_answer_that_fails_has_a_reason_and_the_others_of_its_group_have_rewards() -> None:
    [found] = asked([ODD], use="tests.rewards.scores:odd", time_limit=6)
    by_name = dict(zip(ODD, found, strict=True))
    assert by_name["fine"] == Scored(1.0)
    assert by_name["none"] == Scored(None)
    reasons = {name: each.failure for name, each in by_name.items() if each.failure}
    raised = re.fullmatch(r"ValueError: no such answer \((.*), line (\d+)\)", reasons.pop("raise"))
    assert raised is not None
    assert Path(raised[1]) == Path(scores.__file__)
    assert 'raise ValueError("no such answer")' in Path(raised[1]).read_text().splitlines()[int(raised[2]) - 1]
    assert reasons == {
        "exit": "ended (exit code 3)",
        "crash": "was ended by signal 9",
        "hang": "took more than 6 s",
        "nan": "it returned nan, no finite number",
        "words": "it returned 'high', no finite number",
    }


def test_values_that_are_no_finite_floats_have_reasons_and_the_call_is_not_made_again(tmp_path: Path) -> None:
    given = {"use": "tests.rewards.scores:no_floats", "options": {"file": str(tmp_path / "calls")}}
    [found] = asked([NO_FLOATS], **given)
    assert dict(zip(NO_FLOATS, found, strict=True)) == {
        "huge": Scored(None, "it returned an integer that is larger than any float"),
        "longer than can be printed": Scored(None, "it returned an integer that is larger than any float"),
        "decimal": Scored(None, "it returned Decimal('0.5'), no finite number"),
        "complex": Scored(None, "it returned 1j, no finite number"),
        "nameless": Scored(None, "it returned a Nameless, no finite number"),
        "wordless": Scored(None, f"it returned [{'1, ' * 19}1,, no finite number"),
        "fine": Scored(1.0),
    }
    assert (tmp_path / "calls").read_text() == "7\n"


def test_an_error_that_cannot_be_printed_is_a_reason_too() -> None:
    [[found]] = asked([["unspeakable"]], use="tests.rewards.scores:odd")
    assert found.failure is not None
    assert found.failure.startswith("Nameless: a Nameless (")


@pytest.mark.skipif(os.name != "posix", reason="process groups are of POSIX")
def test_a_call_that_takes_too_long_leaves_none_of_the_processes_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "started"
    given = {"use": "tests.rewards.scores:starting", "options": {"file": str(file)}, "time_limit": 5}
    [[found]] = asked([["a"]], **given)
    assert found.failure == "took more than 5 s"
    started = int(file.read_text())
    for _ in range(100):
        if not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    os.kill(started, signal.SIGKILL)
    raise AssertionError("it still runs")


def test_a_wrong_count_is_a_failure_with_both_numbers() -> None:
    [[found]] = asked([["few"]], use="tests.rewards.scores:odd")
    assert found.failure == "it returned 0 rewards for 1 answer"


def test_an_error_of_a_verifier_that_ships_names_no_line() -> None:
    [[found]] = asked([["a"]], use="regex", options={"pattern": "a", "compare": True})
    assert found.failure == "ValueError: the pattern 'a' has no group to compare"


def test_a_function_gets_the_columns_that_it_names() -> None:
    """As TRL gives them: a list with the row's value for each answer, None where the row has none."""
    reward = AskedReward(Reward(use="tests.rewards.scores:by_level", options={"base": 1}), 0, ["answer", "level"])
    found: dict[int, Sequence[Scored]] = {}
    groups = [
        Group("p", None, ["a", "b"], [[1], [2]], {"answer": "b", "level": 3, "base": 9}),
        Group("p", None, ["c"], [[1]], {"answer": "c"}),
    ]
    reward.ask(list(enumerate(groups)), found.__setitem__)
    assert [[each.value for each in found[number]] for number in (0, 1)] == [[1, 4], [1]]


def test_a_function_with_others_gets_all_columns_but_those_called_as_its_lists_are() -> None:
    reward = AskedReward(Reward(use="tests.rewards.scores:names"), 0, ["level", "prompts", "no name"])
    found: dict[int, Sequence[Scored]] = {}
    row = {"level": 1, "prompts": "other", "no name": 2}
    reward.ask([(0, Group("p", None, ["a"], [[1]], row))], found.__setitem__)
    assert found[0] == [Scored(1.0)]


def test_a_function_may_get_messages_as_trl_has_them() -> None:
    reward = AskedReward(Reward(use="tests.rewards.scores:of_messages", messages=True), 0)
    found: dict[int, Sequence[Scored]] = {}
    prompt = [{"role": "user", "content": "2 + 2?"}]
    reward.ask([(0, Group("user: 2 + 2?", None, ["4", "five"], [[1], [2]], {}, prompt))], found.__setitem__)
    assert [each.value for each in found[0]] == [7, 10]


def test_what_takes_no_argument_by_name_gets_no_column() -> None:
    """`*rest` is no parameter called rest."""
    reward = AskedReward(Reward(use="tests.rewards.scores:star"), 0, ["rest"])
    found: dict[int, Sequence[Scored]] = {}
    reward.ask([(0, Group("p", None, ["abc"], [[1]], {"rest": 1}))], found.__setitem__)
    assert found[0] == [Scored(3.0)]


def test_a_verifier_that_ships_gets_no_columns() -> None:
    """`tests` is an option of the reward code, and may be a column of the data."""
    reward = AskedReward(Reward(use="exact_match"), 0, ["ignore_case"])
    found: dict[int, Sequence[Scored]] = {}
    reward.ask([(0, Group("p", "A", ["a"], [[1]], {"ignore_case": True}))], found.__setitem__)
    assert found[0] == [Scored(0.0)]


def test_a_function_that_names_a_column_no_row_has_is_refused_with_those_that_rows_have() -> None:
    with pytest.raises(UserError) as refused:
        AskedReward(Reward(use="tests.rewards.scores:by_level", options={"base": 1}), 0, ["answers", "level"]).start()
    [problem] = refused.value.problems
    assert "missing a required argument: 'answer'" in problem.why
    assert "completion_ids, answers, level (with **others" in problem.fix


def test_a_function_that_names_none_of_the_lists_is_refused_with_their_names() -> None:
    with pytest.raises(UserError) as refused:
        AskedReward(Reward(use="tests.rewards.scores:other_names"), 0).start()
    [problem] = refused.value.problems
    assert "cannot be called with none of the lists that a reward gets: missing a required" in problem.why
    assert "prompts, completions, references, completion_ids" in problem.fix


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("tests.rewards.scores:nothing", "tests.rewards.scores has no nothing"),
        ("no_such_module:f", "cannot be imported"),
        ("tests.rewards.scores:needs_more", "cannot be called with completions: missing a required argument"),
        ("regex", "cannot be called with completions, references: missing a required argument: 'pattern'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_any_answer(use: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        AskedReward(Reward(use=use), 0).start()


def test_waiting_for_one_of_three_processes_takes_no_processor_time() -> None:
    """The middle one is slow: the first and the last have ended long before."""
    before = time.thread_time()
    asked([["a"], ["slow"], ["b"]], use="tests.rewards.scores:patient", processes=3)
    assert time.thread_time() - before < 1


def test_all_processes_of_all_rewards_start_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their module waits, as it is imported, until five of them import it."""
    monkeypatch.setenv("STARTED_TOGETHER", f"{tmp_path} 5")
    rewards = [{"use": "tests.rewards.started:zeros", "processes": 3}]
    rewards.append({**rewards[0], "processes": 2, "name": "other"})
    Rewarding([Reward.model_validate(each) for each in rewards]).start()


def test_all_functions_that_cannot_be_called_are_refused_at_once() -> None:
    uses = ("tests.rewards.scores:nothing", "exact_match", "tests.rewards.scores:needs_more")
    with pytest.raises(UserError) as refused:
        Rewarding([Reward(use=each) for each in uses]).start()
    assert [each.field.split(".")[-2] for each in refused.value.problems] == ["0", "2"]


def test_no_process_is_left_of_a_trial_nor_of_functions_that_are_refused() -> None:
    before = set(psutil.Process().children())
    rewarding = Rewarding([Reward(use=each) for each in ("exact_match", "tests.rewards.scores:never")])
    rewarding.start(keep=False)
    with pytest.raises(UserError):
        Rewarding([Reward(use=each) for each in ("exact_match", "tests.rewards.scores:nothing")]).start()
    assert set(psutil.Process().children()) <= before
    rewarding.start()
    assert len(set(psutil.Process().children()) - before) == 2, "they start anew"


@pytest.mark.skipif(os.name != "posix", reason="process groups are of POSIX")
def test_a_call_under_way_outlasts_signals_to_the_process_group_and_is_not_made_again(tmp_path: Path) -> None:
    """Ctrl-C, and a launcher's SIGTERM to its ranks, are for the run, which saves first."""
    with waiting(tmp_path / "asked") as asking:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(asking.pid, number)
        (tmp_path / "asked.go").touch()
        printed, _ = asking.communicate()
    assert printed == "[[1.0, 2.0]]\n"
    assert (tmp_path / "asked").read_text() == "['a', 'bb']\n"


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is of POSIX")
def test_a_process_whose_call_never_ends_goes_with_the_run_that_is_killed(tmp_path: Path) -> None:
    with waiting(tmp_path / "asked") as asking:
        [computing] = psutil.Process(asking.pid).children()
        asking.kill()
    assert psutil.wait_procs([computing], timeout=30) == ([computing], [])


@contextmanager
def waiting(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields a process, the first of its group, which has asked for the rewards of two answers and waits for them. It
    does nothing about signals."""
    program = f"""
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
from tests.rewards.test_asking import asked, values
print(values(asked([["a", "bb"]], use="tests.rewards.scores:waited", options={{"file": {str(file)!r}}})))
"""
    command, root = [sys.executable, "-c", program], Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True) as asking:
        while not file.exists():
            assert asking.poll() is None
            time.sleep(0.02)
        yield asking


def test_processes_end_with_the_reward() -> None:
    before = {each.pid for each in psutil.Process().children()}
    reward = AskedReward(Reward(use="exact_match", processes=2), 0)
    reward.start()
    own = [each for each in psutil.Process().children() if each.pid not in before]
    assert len(own) == 2
    del reward
    assert not any(each.is_running() for each in own)
