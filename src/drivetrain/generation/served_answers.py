"""Answers that a server draws with the model's weights, which go to it through a folder that both see."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from drivetrain.config.generation import Generation
from drivetrain.config.rollout_server import FOLDER
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.server_client import ServerClient, StartedAnew
from drivetrain.generation.side_threads import all_beside, beside
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import Came, Drawn, Generates, MakesSamples, Prompt

T = TypeVar("T")
Part = dict[int, Drawn]  # answers by the numbers of their prompts
Once = Callable[[Callable[[], Part]], Part]


class ServedAnswers:
    """Draws as the engine's model is at the time. All ranks call its methods together."""

    def __init__(
        self,
        learner: MakesSamples,
        engine: Engine,
        workload: Workload,
        ranks: Communicator,
        folder: Path,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """learner: the workload, which names the server. folder: of the run, which holds the weights where the settings
        name no other. is_stopping: whether a signal asks the run to stop, which ends the wait for the server with
        Stopping."""
        settings = learner.server
        assert settings is not None, "no server is named"
        assert isinstance(workload, Generates), "the workload's model writes no tokens"
        self._settings, self._is_stopping = settings, is_stopping
        self._client = ServerClient(settings, learner.server_field)
        self._engine, self._workload, self._ranks = engine, workload, ranks
        self._answers: Generates = workload
        bounds = [each for each in (workload.places, learner.longest_made) if each is not None]
        self._longest, self._reads_logprobs = min(bounds, default=None), learner.reads_logprobs
        self._folder = (folder if settings.weights is None else Path(settings.weights).expanduser()).absolute() / FOLDER
        self._checked = 0  # tokens of the longest prompt with its answer that the server was checked for
        self.seconds: dict[str, float] = {}  # that the last batch took, by what took them

    def answers(
        self, prompts: Sequence[Prompt], draws: Sequence[int], settings: Generation, came: Came, once: Once
    ) -> list[Drawn]:
        """Returns an answer to each of this rank's prompts, which of the ranks that share them one asks for.

        draws: a number for each, from which its seed comes. came: called with each as it comes. Raises UserError if the
        server cannot answer, before the first; RunError if it does not any more.
        """
        self.seconds = {}
        longest = max(self._ranks.all_gather(max((len(each.ids) for each in prompts), default=0)))
        if not longest:
            return []
        most = min(longest + settings.max_new_tokens, self._longest or longest + settings.max_new_tokens)
        if most > self._checked:
            adapted = self._workload.adapters is not None
            heat, reads = settings.temperature, self._reads_logprobs
            self._ranks.on_each(lambda: self._client.check(most, heat, adapted, reads))
            self._checked = most
        found: Part = {}
        while True:  # anew only where the server was started anew meanwhile
            self._timed("push_seconds", self._push)
            lacking = [number for number in range(len(prompts)) if number not in found]
            asked = partial(self._asked, lacking, prompts, draws, settings, came)
            found |= self._timed("answer_seconds", partial(once, asked))
            if all(self._ranks.all_gather(len(found) == len(prompts))):
                return [found[number] for number in range(len(prompts))]

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result

    def _push(self) -> None:
        """Gives the server the weights as they are."""
        weights, label = self._engine.weights(), self._ranks.on_first(lambda: uuid.uuid4().hex)
        self._ranks.on_first(lambda: beside(lambda: self._give(weights, label), self._is_stopping))
        self._client.label = label

    def _give(self, weights: Mapping[str, Tensor], label: str) -> None:
        """Writes them into the folder, which is gone again afterwards."""
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
        self._folder.mkdir(parents=True)
        try:
            if self._workload.adapters is None:
                save_torch_state_dict({name: self._as_served(tensor) for name, tensor in weights.items()}, self._folder)
                self._client.load(self._folder, label)
            else:
                self._engine.save_assets(self._folder, weights)
                self._client.load_adapter(self._folder, label)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _as_served(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the dtype that the server rounds it to, where that is a smaller one."""
        dtype = getattr(torch, (self._client.dtype or "").removeprefix("torch."), tensor.dtype)
        fits = isinstance(dtype, torch.dtype) and dtype.is_floating_point and tensor.is_floating_point()
        fits = fits and dtype.itemsize < tensor.element_size()
        return tensor.detach().to("cpu", dtype if fits else tensor.dtype).contiguous()

    def _asked(
        self,
        numbers: Sequence[int],
        prompts: Sequence[Prompt],
        draws: Sequence[int],
        settings: Generation,
        came: Came,
    ) -> Part:
        """Returns the answers to the prompts of these numbers: those that came, where the server was started anew."""
        longest, found, over = self._longest, Part(), threading.Event()

        def drawn(number: int) -> Drawn:
            ids, most = prompts[number].ids, settings.max_new_tokens
            room = most if longest is None else min(most, longest - len(ids))
            seed = self._seed(draws[number])
            return self._client.drawn(ids, room, settings.temperature, seed, self._answers.ends, over.is_set)

        def keep(number: int, answer: Drawn) -> None:
            came(number, answer)
            found[number] = answer

        try:
            all_beside(drawn, numbers, self._settings.at_once, self._is_stopping, keep)
            self._client.check_label()
        except StartedAnew:
            pass  # after the last answer, or with some still lacking: what came was drawn before
        finally:
            over.set()
        return found

    def _seed(self, draw: int) -> int:
        """Returns the seed of an answer, which vLLM takes up to 63 bits of."""
        return int(np.random.SeedSequence((self._answers.seed, draw)).generate_state(1, np.uint64)[0] >> 1)
