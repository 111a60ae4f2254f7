"""Asks rewards for groups of answers. A call that crashes, hangs or returns nonsense is the reason of its answers
alone."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drivetrain.config.reinforcement import FIELD, Reward
from drivetrain.rewards.process import FailedCall, RewardProcess, WrongCount


@dataclass(frozen=True)
class Group:
    """Answers to one prompt. prompt, reference: texts, as are answers. ids: tokens of each answer. columns: what the
    prompt's row has, by name. messages: the prompt's, as a chat template takes them."""

    prompt: str
    reference: str | None
    answers: Sequence[str]
    ids: Sequence[Sequence[int]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()

    def only(self, number: int) -> Group:
        one = slice(number, number + 1)
        return replace(self, answers=self.answers[one], ids=self.ids[one])

    def given(self, as_messages: bool) -> dict[str, Any]:
        """The arguments of a reward: a list with an entry for each answer, and the columns, which are one for all.

        as_messages: whether prompts and answers are lists of messages."""
        count = len(self.answers)
        answers = [[{"role": "assistant", "content": each}] if as_messages else each for each in self.answers]
        return {
            "prompts": [self.messages if as_messages else self.prompt] * count,
            "completions": answers,
            "completion_ids": [list(each) for each in self.ids],
            "references": [self.reference] * count,
            "columns": self.columns,
        }


@dataclass(frozen=True)
class Scored:
    """An answer's value; None where the reward does not apply to it, or failed: `failure` is the reason then."""

    value: float | None
    failure: str | None = None


Receive = Callable[[int, Sequence[Scored]], None]  # the number of a group, and its answers' values


class AskedReward:
    """One reward that a function computes, in its processes."""

    def __init__(self, reward: Reward, number: int, columns: Sequence[str] = ()) -> None:
        """columns: those that rows have."""
        self.reward = reward
        self.wrong_count: str | None = None  # of a call for several answers that was made again for each
        where = f"{FIELD}.rewards.{number}.use"
        self._processes = [RewardProcess(reward, where, columns) for _ in range(reward.processes)]
        weakref.finalize(self, _close, self._processes)

    def begin(self) -> None:
        """Starts the processes, and does not wait until they are ready."""
        for each in self._processes:
            each.begin()

    def start(self) -> None:
        """Waits until the processes are ready. Raises UserError if the function cannot be called."""
        self.begin()
        for each in self._processes:
            each.start()

    def close(self) -> None:
        """Ends the processes; a later start or call starts them anew."""
        _close(self._processes)

    def ask(self, groups: Sequence[tuple[int, Group]], receive: Receive) -> None:
        """Calls `receive`, from several threads, with the values of each group as they come."""
        waiting: queue.SimpleQueue[tuple[int, Group]] = queue.SimpleQueue()
        for each in groups:
            waiting.put(each)
        errors: list[BaseException] = []

        def work(process: RewardProcess) -> None:
            try:
                while not errors:
                    number, group = waiting.get_nowait()
                    receive(number, self._scored(process, group))
            except queue.Empty:
                return
            except BaseException as error:  # raised again by the thread that asks
                errors.append(error)

        threads = [threading.Thread(target=work, args=(each,)) for each in self._processes[: len(groups)]]
        for thread in threads:
            thread.start()
        while busy := [thread for thread in threads if thread.is_alive()]:
            busy[0].join(0.7)  # on two lines: a watcher sees that this goes on, for each call ends in time
            busy[-1].join(0.7)
        if errors:
            raise errors[0]

    def _scored(self, process: RewardProcess, group: Group) -> list[Scored]:
        """Returns the values of a group's answers. If the call for all of them fails, each is asked for by itself."""
        count = len(group.answers)
        try:
            return [Scored(*each) for each in process.values(group.given(self.reward.messages), count)]
        except FailedCall as error:
            if count == 1:
                return [Scored(None, str(error))]
            if isinstance(error, WrongCount):
                self.wrong_count = self.wrong_count or str(error)
        return [each for number in range(count) for each in self._scored(process, group.only(number))]


def _close(processes: Sequence[RewardProcess]) -> None:
    for each in processes:
        each.close()
