"""Makes the windows of a training: from the data, or from samples that the model makes on the way.

Samples are made at the first of the steps that they are used for, from the prompts of that step's global batch, and
divided among all ranks. They belong to the workload's state, so that a run that is resumed between two such steps goes
on with the same; their random draws are a function of the run's seed and the step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal

import numpy as np

from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch, Window, training_windows
from drivetrain.data.micro_batches import Slice, rank_share
from drivetrain.data.order import Order
from drivetrain.data.ordered_cuts import fewest_pieces, ordered_pieces
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import restore_rng_state, rng_state, seed_everything
from drivetrain.engines.base import Engine
from drivetrain.errors import RunError
from drivetrain.generation.passes import Passes
from drivetrain.generation.served_answers import ServedAnswers
from drivetrain.runtime.journal import Journal
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import MakesSamples

# gets a step, and the numbers of answers and rewards that were asked for again for it
Made = Callable[[int, Mapping[str, int]], None]


def windows_of(
    run: RunConfig,
    workload: Workload,
    engine: Engine,
    order: Order,
    steps: range,
    mine: Slice,
    *,
    workers: bool = True,
    pin_memory: bool = False,
    journal: Journal | None = None,
    covered: Callable[[], int] = lambda: 0,
    made: Made = lambda _, __: None,
    server: ServedAnswers | None = None,
) -> Iterator[Window]:
    """Yields the windows of these steps. workers: whether processes beside this one may load samples. journal: results
    of an earlier start. covered: returns the first step that a resumed run may have to make again. made: called after
    samples were made, with the first step of those that use them and what an earlier start had asked for already.
    server: draws answers in the model's place."""
    if isinstance(workload, MakesSamples):
        return _made_windows(run, workload, engine, order, steps, mine, journal, covered, made, server)
    loader = run.loader if workers else run.loader.model_copy(update={"workers": 0})
    return training_windows(workload.train, workload.collate, order, steps, mine, loader, pin_memory)


def source_of(workload: Workload) -> Literal["data", "answers"]:
    """Returns what windows are made of."""
    return "answers" if isinstance(workload, MakesSamples) else "data"


def own_tokens(workload: Workload, counts: bool, micro_batches: Sequence[MicroBatch]) -> int | None:
    """Returns the tokens of a window on this rank, padding left out; None if samples have none. counts: whether this
    rank's samples are its alone to count."""
    found = [workload.tokens(batch.tensors) for batch in micro_batches if batch.counts and counts]
    return None if None in found else sum(filter(None, found))


def _made_windows(
    run: RunConfig,
    workload: MakesSamples,
    engine: Engine,
    order: Order,
    steps: range,
    mine: Slice,
    journal: Journal | None,
    covered: Callable[[], int],
    made: Made,
    server: ServedAnswers | None,
) -> Iterator[Window]:
    updates, uses, ranks = workload.updates_per_batch, workload.steps_per_batch, Communicator()
    at_once = mine.micro_batch_size * (updates if run.micro_batch_limit is None else 1)  # of all updates
    passes = Passes(engine, workload, ranks, at_once, journal, server)
    for step in steps:
        first = step - step % uses
        if workload.made_at != first:
            passes.journal.begin(first, covered())
            workload.keep_made(first, _made(run, workload, engine, order, first, mine, passes, ranks))
            again = ranks.all_gather(passes.journal.counted_again())
            made(first, {what: sum(each.get(what, 0) for each in again) for what in dict.fromkeys(chain(*again))})
        turn, update = divmod(step - first, updates)
        shuffled = np.random.default_rng([run.seed, first, 1 + turn]).permutation(len(workload.made))
        indices = np.array_split(shuffled, updates)[update]
        if not len(indices):
            why = f"step {step + 1}: {len(workload.made)} samples were made, for {updates} updates"
            raise RunError(f"{why}: let each prompt give more, or take fewer updates of them")
        epoch, _ = order.batch(step)
        yield Window(step, epoch, indices, *_cut(workload, workload.made, indices, mine), made_at=first)


def stand_in_window(workload: MakesSamples, order: Order, mine: Slice) -> Window:
    """Returns the first step's window with stand-ins for its samples: for plans, which make none."""
    epoch, prompts = order.batch(0)
    samples = workload.stand_ins([workload.train.load(int(index), epoch) for index in prompts])
    indices = np.arange(-(-len(samples) // workload.updates_per_batch))
    return Window(0, epoch, indices, *_cut(workload, samples, indices, mine))


def _cut(
    workload: MakesSamples, samples: Sequence[object], indices: np.ndarray, mine: Slice
) -> tuple[list[MicroBatch], int]:
    """Returns this rank's micro-batches, and the number of samples of the largest."""
    ranks = range(mine.data_world)
    shares = [rank_share(np.arange(len(indices)), rank, mine.data_world) for rank in ranks]
    if workload.shares_prompts:  # those of one prompt together
        shares = [share[np.argsort(indices[share], kind="stable")] for share in shares]
    pieces = _pieces(workload, [[samples[int(indices[place])] for place in share] for share in shares], mine)
    pieces = [shares[mine.data_rank][piece] for piece in pieces]
    own = [indices[piece] if len(piece) else indices[:1] for piece in pieces]
    tensors = [workload.collate([samples[int(index)] for index in each]) for each in own]
    window = [MicroBatch(batch, len(piece) > 0, piece) for batch, piece in zip(tensors, pieces, strict=True)]
    return window, max(map(len, pieces))


def _pieces(workload: MakesSamples, shares: Sequence[Sequence[object]], mine: Slice) -> list[np.ndarray]:
    """Returns the places, in this rank's share, of each micro-batch's samples: of as many on each rank. shares: each
    rank's samples."""
    most, bound = mine.most_made, mine.micro_batch_size
    sizes = [] if most is None else [each for each in map(workload.made_sizes, shares) if each is not None]
    if most is None or not sizes:
        return np.array_split(np.arange(len(shares[mine.data_rank])), -(-max(map(len, shares)) // bound))
    count = max(fewest_pieces(each, bound, most) for each in sizes)
    return ordered_pieces(sizes[mine.data_rank], count, bound, most)


def _made(
    run: RunConfig,
    workload: MakesSamples,
    engine: Engine,
    order: Order,
    step: int,
    mine: Slice,
    passes: Passes,
    ranks: Communicator,
) -> list[object]:
    """Returns the samples of all ranks, in the order of their prompts. Random generators are restored."""
    epoch, indices = order.batch(step)
    places = rank_share(np.arange(len(indices)), mine.data_rank, mine.data_world).tolist()
    prompts = [workload.train.load(int(indices[place]), epoch) for place in places]
    draws = [_number(run.seed, step, place) for place in places]
    state = rng_state()
    try:
        seed_everything(_number(run.seed, step, len(indices)) % 2**32)
        found = workload.make_samples(prompts, draws, passes)
    finally:  # a signal may end the wait for a server, and the run saves then
        restore_rng_state(state)
    if len(found) != len(prompts):
        raise RunError(f"make_samples gave {len(found)} lists of samples for {len(prompts)} prompts")
    own = dict(zip(places, found, strict=True)) if engine.counts_samples else {}
    everyone = {place: samples for share in ranks.all_gather(own) for place, samples in share.items()}
    return [sample for place in sorted(everyone) for sample in everyone[place]]


def _number(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
