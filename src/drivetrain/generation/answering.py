"""Answers prompts through an engine, as training, evaluation and prediction have it.

Where each rank can run batches of its own (`Engine.runs_own_batches`), prompts are dealt to the ranks, and the whole of
an answer is one piece of work that the engine lets a rank do with its model, cache included. A forward pass may still
talk to other ranks, which gather weights or sum activations; so all ranks take equally many, and those that share
samples go on with the same tokens. Engines whose ranks compute a batch together (replicas of dp, stages, parts of
sequences) run whole sequences through their `predict`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.generation import Generation
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.local_forward import LocalForward, cells_of, stores_of
from drivetrain.generation.prepacked_weights import prepacked
from drivetrain.generation.requests import Answer, Piece, Receiver, Request, Sampling, joined
from drivetrain.generation.row_stores import Batch, Choose, Forward, RowStore, WholeRows, nothing
from drivetrain.generation.running_batch import RunningBatch
from drivetrain.generation.sampling import Choice
from drivetrain.generation.sequence import Running
from drivetrain.models.language_options import language_part
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import AnswersBeside, Generates, Prompt
from drivetrain.workloads.loss_contract import LossContext

MakeStore = Callable[[Forward], RowStore]
Decode = Callable[[Sequence[int]], str]


class Answering:
    """Answers prompts by one engine and workload. All ranks call its methods together. rows: answers at once.

    reference: lets the reference answer that the model is held to, in the model's place; on engines whose ranks run
    batches of their own.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Generates,
        ranks: Communicator,
        rows: int,
        reference: AnswersBeside | None = None,
    ) -> None:
        assert reference is None or engine.runs_own_batches
        self._engine, self._workload, self._ranks, self._rows = engine, workload, ranks, rows
        self._reference = reference
        self._stores: MakeStore | None = None  # once the model's cache was tried

    def own(
        self,
        prompts: Sequence[Prompt],
        draws: Sequence[int],
        top_logprobs: int | None = None,
        settings: Generation | None = None,
        as_drawn: bool = False,
        with_text: bool = True,
    ) -> list[Answer]:
        """Returns the answers to this rank's prompts, in their order.

        draws: a number for each prompt, which with the run's seed decides what is drawn for it, independently of other
        prompts. settings: how answers are chosen; None: by the workload's own. as_drawn: whether log-probabilities are
        those at the temperature at which tokens are drawn. with_text: whether answers have their text, which is decoded
        token by token.
        """
        chosen = settings or self._workload.settings
        each = zip(prompts, draws, strict=True)
        requests = [self._request(prompt, draw, top_logprobs, chosen, as_drawn) for prompt, draw in each]
        decode = self._workload.decoded if with_text else _no_text
        with _uncompiled():
            if self._engine.runs_own_batches:
                return self._with_own_model(requests, decode)
            forward = _Together(self._engine, self._ranks)
            return self._run(requests, decode, self._whole(forward), forward, 2**62)

    def dealt(self, prompts: Mapping[int, Prompt], top_logprobs: int | None = None) -> dict[int, Answer]:
        """Returns number → answer of these prompts, which are the same on all ranks; so are the answers."""
        engine = self._engine
        numbers = list(prompts)
        if not engine.runs_own_batches:
            return dict(zip(numbers, self.own(list(prompts.values()), numbers, top_logprobs), strict=True))
        mine = numbers[engine.data_rank :: engine.data_world]
        found = self.own([prompts[number] for number in mine], mine, top_logprobs)
        own = dict(zip(mine, found, strict=True)) if engine.counts_samples else {}
        everyone = {number: answer for part in self._ranks.all_gather(own) for number, answer in part.items()}
        return {number: everyone[number] for number in numbers}

    def _request(
        self, prompt: Prompt, draw: int, top_logprobs: int | None, settings: Generation, as_drawn: bool
    ) -> Request:
        sampling = Sampling(temperature=settings.temperature, seed=self._workload.seed, draw=draw)
        as_drawn = as_drawn and settings.temperature > 0
        return Request(
            prompt.ids, settings.max_new_tokens, sampling, top_logprobs=top_logprobs, logprobs_as_drawn=as_drawn
        )

    def _with_own_model(self, requests: Sequence[Request], decode: Decode) -> list[Answer]:
        found: list[Answer] = []

        def work(trained: nn.Module, _: Batch) -> None:
            with self._answering(trained) as model, prepacked(model):
                forward = LocalForward(model)
                own = language_part(model)
                if self._stores is None:
                    self._stores = WholeRows if own is None else stores_of(forward, own)
                in_step: Forward = forward if self._engine.is_alone else _InStep(forward, self._engine, self._ranks)
                cells = 2**62 if own is None else cells_of(own)
                found.extend(self._run(requests, decode, self._stores(in_step), in_step, cells))

        self._engine.without_gradient([MicroBatch({"ids": torch.zeros(1, 1, dtype=torch.int64)})], work)
        return found

    def _answering(self, trained: nn.Module) -> AbstractContextManager[nn.Module]:
        if self._reference is None:
            return nullcontext(trained)
        return self._reference.answering_reference(trained, LossContext(self._engine.auxiliary))

    def _run(
        self, requests: Sequence[Request], decode: Decode, store: RowStore, forward: Forward, cells: int
    ) -> list[Answer]:
        """Prompts of like length begin together; the answers are in the order of the requests."""
        batch = RunningBatch(store, self._rows, cells)
        pieces: list[list[Piece]] = [[] for _ in requests]
        for number in sorted(range(len(requests)), key=lambda each: (len(requests[each].ids), requests[each].ids)):
            batch.add(self._running(requests[number], number, decode, _Kept(pieces[number])))
        while batch.requests:
            batch.step()
        if isinstance(forward, _InStep):
            forward.wait_for_others(lambda: store.new().start([[0]], nothing))
        return [joined(each) for each in pieces]

    def _running(self, request: Request, number: int, decode: Decode, receive: Receiver) -> Running:
        workload = self._workload
        places = workload.places
        most = request.max_new_tokens if places is None else max(0, places - len(request.ids))
        return Running(number, request, receive, decode, workload.ends, most)

    def _whole(self, forward: Forward) -> WholeRows:
        return WholeRows(forward, _unused, self._workload.batch_of)


def sampler(
    engine: Engine, workload: Workload, ranks: Communicator, rows: int
) -> Callable[[], list[dict[str, Any]]] | None:
    """Returns what answers the workload's own prompts, if it has any: {"prompt", "answer", "reference"} of each. All
    ranks call it together. rows: answers at once."""
    if not isinstance(workload, Generates) or not workload.prompts:
        return None
    prompts, answering = workload.prompts, Answering(engine, workload, ranks, rows)

    def samples() -> list[dict[str, Any]]:
        found = answering.dealt(dict(enumerate(prompts)))
        return [
            {"prompt": prompt.text, "answer": found[number].text, "reference": prompt.reference}
            for number, prompt in enumerate(prompts)
        ]

    return samples


def sampler_beside(
    engine: Engine, workload: Workload, ranks: Communicator, rows: int
) -> Callable[[], list[dict[str, Any]]] | None:
    """Returns `sampler`'s, with the answer of the reference that the model is held to as "reference_model", where there
    is one that can answer. It answers once for all evaluations if it stays as it is."""
    own = sampler(engine, workload, ranks, rows)
    if own is None or not isinstance(workload, AnswersBeside) or not engine.runs_own_batches:
        return own
    how = workload.reference_answers
    if how == "never":
        return own
    assert isinstance(workload, Generates)
    prompts, answering = workload.prompts, Answering(engine, workload, ranks, rows, reference=workload)
    known: dict[int, Answer] = {}

    def samples() -> list[dict[str, Any]]:
        if how == "anew" or not known:
            known.update(answering.dealt(dict(enumerate(prompts))))
        return [{**row, "reference_model": known[number].text} for number, row in enumerate(own())]

    return samples


def _no_text(ids: Sequence[int]) -> str:
    del ids
    return ""


class _Kept:
    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def __call__(self, piece: Piece) -> None:
        self._pieces.append(piece)


class _InStep:
    """A forward pass that all ranks take together: those that are ready wait for the others."""

    def __init__(self, forward: Forward, engine: Engine, ranks: Communicator) -> None:
        self._forward, self._engine, self._ranks = forward, engine, ranks
        self._waits = False

    def __call__(self, batch: Batch, work: Callable[[nn.Module, Batch], Tensor], choose: Choose) -> list[Choice]:
        if not self._waits:
            self._ranks.all_gather(True)
        return self._agreed(self._forward(batch, work, choose))

    def wait_for_others(self, fill: Callable[[], Any]) -> None:
        """Takes passes whose results are dropped, until no rank has one to take. fill: takes one."""
        self._waits = True
        while any(self._ranks.all_gather(False)):
            fill()

    def _agreed(self, choices: list[Choice]) -> list[Choice]:
        """Makes ranks that share samples go on with the same tokens, even if the last bits of their logits differ."""
        rank = self._engine.data_rank
        everyone = self._ranks.all_gather((rank, self._engine.counts_samples, choices))
        return next(found for other, counts, found in everyone if other == rank and counts)


class _Together:
    """A forward pass of a batch that all ranks compute together, by the engine's `predict`."""

    def __init__(self, engine: Engine, ranks: Communicator) -> None:
        self._engine, self._ranks = engine, ranks

    def __call__(self, batch: Batch, work: Callable[[nn.Module, Batch], Tensor], choose: Choose) -> list[Choice]:
        del work  # the workload's own
        # all ranks of a data-parallel engine have the same prompts: those of the first count
        rows = list(self._engine.predict([MicroBatch(batch, counts=self._engine.data_rank == 0)]))
        return self._ranks.on_first(lambda: choose(torch.stack([row["logits"] for row in rows])))


def _unused(_: nn.Module, __: Batch) -> Tensor:
    raise AssertionError("the engine's predict runs the model")


def _uncompiled() -> AbstractContextManager[Any]:
    """Runs without compilation: sequences grow with each token, and every length would be compiled. A compiler that was
    never imported has compiled nothing."""
    has_compiled = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()
