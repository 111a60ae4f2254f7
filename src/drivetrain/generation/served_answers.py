"""Answers that a server draws with the model's weights, which go to it through a folder that both see."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from drivetrain.config.generation import Generation
from drivetrain.config.rollout_server import FOLDER, RolloutServer
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.server_client import ServerClient
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import Came, Drawn, Generates, Prompt

Once = Callable[[Callable[[], list[Drawn]]], list[Drawn]]


class ServedAnswers:
    """Draws as the engine's model is at the time. All ranks call its methods together."""

    def __init__(
        self, settings: RolloutServer, engine: Engine, workload: Workload, ranks: Communicator, folder: Path
    ) -> None:
        """folder: of the run, which holds the weights where the settings name no other."""
        assert isinstance(workload, Generates), "the workload's model writes no tokens"
        self._settings, self._client = settings, ServerClient(settings)
        self._engine, self._workload, self._ranks = engine, workload, ranks
        self._answers: Generates = workload
        self._folder = (folder if settings.weights is None else Path(settings.weights).expanduser()).absolute() / FOLDER
        self._checked = False

    def answers(
        self, prompts: Sequence[Prompt], draws: Sequence[int], settings: Generation, came: Came, once: Once
    ) -> list[Drawn]:
        """Returns an answer to each of this rank's prompts, which of the ranks that share them one asks for.

        draws: a number for each, from which its seed comes. came: called with each as it comes. Raises UserError if the
        server cannot answer, before the first; RunError if it does not any more.
        """
        longest = self._ranks.all_gather(max((len(each.ids) for each in prompts), default=0))
        if not max(longest):
            return []
        if not self._checked:
            most, adapted = max(longest) + settings.max_new_tokens, self._workload.adapters is not None
            most = min(most, self._answers.places or most)
            self._ranks.on_each(lambda: self._client.check(most, settings.temperature, adapted))
            self._checked = True
        self._push()
        return once(lambda: self._asked(prompts, draws, settings, came))

    def _push(self) -> None:
        """Gives the server the weights as they are."""
        weights = self._engine.weights()
        self._ranks.on_first(lambda: self._give(weights))

    def _give(self, weights: Mapping[str, Tensor]) -> None:
        """Writes them into the folder, which is gone again afterwards."""
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
        self._folder.mkdir(parents=True)
        try:
            if self._workload.adapters is None:
                own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
                save_torch_state_dict(own, self._folder)
                self._client.load(self._folder)
            else:
                self._engine.save_assets(self._folder, weights)
                self._client.load_adapter(self._folder)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _asked(self, prompts: Sequence[Prompt], draws: Sequence[int], settings: Generation, came: Came) -> list[Drawn]:
        places, over = self._answers.places, threading.Event()

        def asked(number: int) -> Drawn | None:
            if over.is_set():
                return None
            ids = prompts[number].ids
            room = settings.max_new_tokens if places is None else min(settings.max_new_tokens, places - len(ids))
            try:
                drawn = self._client.drawn(
                    ids, room, settings.temperature, self._seed(draws[number]), self._answers.ends
                )
            except BaseException:
                over.set()  # the others are not wanted any more
                raise
            came(number, drawn)  # here, so that none is lost where another one fails
            return drawn

        pool = ThreadPoolExecutor(self._settings.at_once, thread_name_prefix="rollout")
        try:
            found = list(pool.map(asked, range(len(prompts))))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [drawn for drawn in found if drawn is not None]

    def _seed(self, draw: int) -> int:
        """Returns the seed of an answer, which vLLM takes up to 63 bits of."""
        return int(np.random.SeedSequence((self._answers.seed, draw)).generate_state(1, np.uint64)[0] >> 1)
