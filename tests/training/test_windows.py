"""Samples made within a step: by the model as it is then, for several updates, alike on any ranks and when resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.saving import save
from drivetrain.config.engines import DdpEngine, FsdpEngine, SingleEngine
from drivetrain.config.run import RunConfig
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder, RepeatedOrder
from drivetrain.data.ordered_cuts import OrderedSizes
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import RunError
from drivetrain.training.windows import windows_of
from drivetrain.workloads.base import Batch
from drivetrain.workloads.generating import MakesSamples, Making
from drivetrain.workloads.loss_contract import LossContext
from tests.parity.mesh_cases import columns
from tests.ranks import RankPool
from tests.tiny_workload import Rows, TinyWorkload, tiny_engine

BATCH, UPDATES, STEPS, SAVED = 7, 2, 6, 3  # saved between two updates of the same samples
ENGINES = {"single": SingleEngine(), "ddp": DdpEngine(), "fsdp": FsdpEngine()}


class Drawn(MakesSamples, TinyWorkload):
    """Three labels drawn for each prompt from the model's own probabilities, as a policy draws its answers."""

    def __init__(self, each: int = 3) -> None:
        super().__init__(columns, Rows(31))
        self._each = each

    @property
    def updates_per_batch(self) -> int:
        return UPDATES

    def make_samples(self, prompts: Sequence[Any], draws: Sequence[int], passes: Making) -> Sequence[Sequence[Any]]:
        def likely(model: nn.Module, batch: Batch, context: LossContext) -> list[Tensor]:
            del context
            return list(model(batch["features"]).softmax(1).cpu())

        found = []
        for (features, _), chances, draw in zip(prompts, passes.each(prompts, likely), draws, strict=True):
            generator = torch.Generator().manual_seed(draw)
            labels = torch.multinomial(chances, self._each, replacement=True, generator=generator)
            found.append([(features, label) for label in labels])
        return found


def run_config() -> RunConfig:
    data = {"type": "module", "path": "none.py"}
    return RunConfig.model_validate({"workload": data, "batch_size": BATCH, "loop": {"steps": STEPS}, "seed": 5})


def trained(engine: Engine, work: Drawn, steps: range) -> tuple[list[float], list[list[int]]]:
    """Losses, and the labels that were made of each step's batch of prompts."""
    order = RepeatedOrder(GlobalOrder(len(work.train), BATCH, seed=1), UPDATES)
    mine, losses, labels = Slice(engine.data_rank, engine.data_world, 4), [], []
    for window in windows_of(run_config(), work, engine, order, steps, mine):
        losses.append(engine.summed(engine.forward_backward(window.micro_batches)).item())
        engine.optimizer_step(1.0)
        labels.append([int(label) for _, label in work.made])
    return losses, labels


def whole_and_resumed(name: str, root: Path) -> Any:
    work = Drawn()
    engine = tiny_engine(work, config=ENGINES[name], devices=Communicator().world)
    first = trained(engine, work, range(SAVED))
    path = save(root / name, SAVED, engine.state_dict(), {}, communicator=Communicator())
    second = trained(engine, work, range(SAVED, STEPS))
    weights = engine.weights()
    engine.close()
    work = Drawn()
    engine = tiny_engine(work, config=ENGINES[name], devices=Communicator().world)
    engine.load_state_dict(load(path))
    torch.manual_seed(99)  # what was drawn before does not matter
    again = trained(engine, work, range(SAVED, STEPS))
    same = all(torch.equal(weights[key], weight) for key, weight in engine.weights().items())
    engine.close()
    return first, second, again, same


def test_samples_are_made_anew_for_each_batch_and_used_for_all_its_updates(tmp_path: Path) -> None:
    (losses, labels), (_, later), (_, again), same = whole_and_resumed("single", tmp_path)
    assert len(labels[0]) == BATCH * 3
    assert labels[0] == labels[1]
    assert labels[2] == later[0] != labels[0]
    assert losses[0] != losses[1]
    assert again == later, "what was made before the save is not made again, and what follows is drawn alike"
    assert same


def test_the_numbers_are_those_of_the_model_at_the_first_of_the_updates() -> None:
    """By hand: probabilities, draws, and the mean loss over the first half of the shuffled samples."""
    work, hand = Drawn(), Drawn()
    engine = tiny_engine(work)
    losses, _ = trained(engine, work, range(1))
    model = hand.build_model()
    _, indices = RepeatedOrder(GlobalOrder(31, BATCH, seed=1), UPDATES).batch(0)
    samples = []
    for place, index in enumerate(indices.tolist()):
        features = hand.train.features[index]
        draw = int(np.random.SeedSequence((5, 0, place)).generate_state(1, np.uint64)[0] >> 1)
        with torch.no_grad():
            chances = model(features[None]).softmax(1)[0]
        generator = torch.Generator().manual_seed(draw)
        samples += [(features, label) for label in torch.multinomial(chances, 3, replacement=True, generator=generator)]
    order = np.random.default_rng([5, 0, 1]).permutation(len(samples))
    batch = hand.collate([samples[i] for i in np.array_split(order, UPDATES)[0]])
    expected = nn.functional.cross_entropy(model(batch["features"]), batch["labels"])
    assert losses[0] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_ranks_make_and_learn_what_one_process_does_and_resume_to_the_bit(
    name: str, ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    alone, later, _, _ = whole_and_resumed("single", tmp_path)
    first, second, again, same = ranks(2).run(whole_and_resumed, name, tmp_path)[0]
    assert (first[1], second[1]) == (alone[1], later[1])
    assert [*first[0], *second[0]] == pytest.approx([*alone[0], *later[0]], rel=1e-5)
    assert again == second
    assert same


class Sized(Drawn):
    """The same, of samples that have tokens: as many as their label and one."""

    def made_sizes(self, samples: Sequence[Any]) -> OrderedSizes:
        tokens = np.array([int(label) + 1 for _, label in samples], dtype=np.int64)
        return OrderedSizes(tokens, np.zeros_like(tokens), packed=True)


def cut_by_tokens(most: int | None) -> tuple[list[float], list[list[int]]]:
    """The losses of two steps, and the tokens of each micro-batch, on this rank."""
    ranks, work = Communicator(), Sized()
    engine = tiny_engine(work, config=DdpEngine() if ranks.world > 1 else SingleEngine(), devices=ranks.world)
    order = RepeatedOrder(GlobalOrder(len(work.train), BATCH, seed=1), UPDATES)
    mine, losses, tokens = Slice(engine.data_rank, engine.data_world, 99, most_made=most), [], []
    for window in windows_of(run_config(), work, engine, order, range(2), mine):
        losses.append(engine.summed(engine.forward_backward(window.micro_batches)).item())
        engine.optimizer_step(1.0)
        pieces = [[work.made[int(window.indices[place])] for place in each.positions] for each in window.micro_batches]
        tokens.append([int(work.made_sizes(piece).tokens.sum()) for piece in pieces])
    engine.close()
    return losses, tokens


def test_samples_that_were_made_are_cut_by_their_tokens_with_the_same_losses(
    ranks: Callable[[int], RankPool],
) -> None:
    (whole, one), (cut, several) = cut_by_tokens(None), cut_by_tokens(6)
    assert [len(each) for each in one] == [1, 1]
    assert all(len(each) > 1 and max(each) <= 6 for each in several)
    assert list(map(sum, several)) == list(map(sum, one)), "none is left out"
    assert cut == pytest.approx(whole, rel=1e-6)
    first, second = ranks(2).run(cut_by_tokens, 6)
    assert first[0] == pytest.approx(whole, rel=1e-5)
    assert [len(each) for each in first[1]] == [len(each) for each in second[1]], "ranks have as many"
    assert max(map(max, [*first[1], *second[1]])) <= 6
    assert [sum(one) + sum(other) for one, other in zip(first[1], second[1], strict=True)] == list(map(sum, one))


def test_fewer_samples_than_updates_are_refused_with_their_numbers() -> None:
    class One(Drawn):
        def make_samples(self, prompts: Sequence[Any], draws: Sequence[int], passes: Making) -> Sequence[Sequence[Any]]:
            found = super().make_samples(prompts, draws, passes)
            return [found[0][:1], *([] for _ in found[1:])]

    work = One()
    with pytest.raises(RunError, match="step 2: 1 samples were made, for 2 updates"):
        trained(tiny_engine(work), work, range(2))


def test_a_checkpoint_keeps_what_was_made() -> None:
    work = Drawn()
    trained(tiny_engine(work), work, range(1))
    state: Mapping[str, Any] = work.state_dict()
    assert state["made_at"] == 0
    assert len(state["made"]) == BATCH * 3
