"""A pipeline's schedules, what its stages save, and stages that have nothing to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.mesh.pipeline import GRAIN, rounded
from drivetrain.engines.mesh.state import stages_items
from drivetrain.errors import RunError, UserError
from tests.parity import mesh_promises as promises
from tests.parity.mesh_cases import Columns, Declared, MeshCase, engine_of
from tests.ranks import RankPool
from tests.tiny_workload import Rows


def seeded(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    """The same weights on all ranks."""

    def build() -> nn.Module:
        torch.manual_seed(5)
        return kind()

    return build


Pools = Callable[[int], RankPool]

# --- schedules -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**9))
def test_what_travels_is_padded_by_an_eighth_at_most(count: int) -> None:
    assert count <= rounded(count) <= max(count + GRAIN, count * 9 / 8)


def test_there_are_few_sizes_and_so_few_schedules() -> None:
    assert len({rounded(count) for count in range(2**16, 2**20, 1000)}) <= 8 * 4 + 1


class Wide(Columns):
    """Hands on many numbers a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(12, 12 * 300)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.widen(self.inner(features)).view(len(features), 300, 12)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def kept_schedules() -> tuple[int, bool]:
    """Schedules that windows of six sizes made, and whether the last one is what is kept."""
    engine: Any = engine_of(MeshCase({"pp": 2}), Declared(seeded(Wide), Rows(62), Rows(10)))
    pipeline, schedules = engine._pipeline, []
    for count in (1, 2, 5, 9, 3, 1):
        engine.forward_backward([Rows(62).micro(*range(count))] * 2)
        engine.optimizer_step(1.0)
        (num_batches, size), schedule = pipeline._made
        schedules.append(schedule)
        assert num_batches == 2
        assert size == rounded(count * 300 * 12)
    return len({id(schedule) for schedule in schedules}), schedules[-1] is pipeline._made[1]


def test_a_stage_keeps_one_schedule_whatever_sizes_came(ranks: Pools) -> None:
    assert ranks(2).run(kept_schedules) == [(6, True)] * 2


# --- state -----------------------------------------------------------------------------------------------------------


class Measured(Columns):
    """Has statistics, but no weights, of what runs before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.BatchNorm1d(12, affine=False)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.scaled(self.inner(features))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def statistics() -> dict[str, Tensor]:
    """Of what two steps saw, as they are saved."""
    engine = engine_of(MeshCase({"pp": 2, "schedule": "gpipe"}), Declared(seeded(Measured), Rows(62), Rows(10)))
    for start in (0, 10):
        engine.forward_backward([Rows(62).micro(*range(start, start + 10))])
        engine.optimizer_step(1.0)
    return {name: weight for name, weight in engine.weights().items() if name.startswith("scaled")}


def test_statistics_of_the_first_stage_are_saved_as_it_saw_them(ranks: Pools) -> None:
    model, rows = seeded(Measured)(), Rows(62)
    updates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in (0, 10):
        batch = rows.batch(*range(start, start + 10))
        F.cross_entropy(model(batch["features"]), batch["labels"]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        updates.step()
        updates.zero_grad()
    found = ranks(2).run(statistics)[0]
    assert found.keys() == {f"scaled.{name}" for name in model.scaled.state_dict()}  # type: ignore[union-attr]
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, model.state_dict()[name])


def joined(names: tuple[str, str]) -> str:
    """Returns what the first rank says to each stage's one item."""
    ranks = Communicator()
    try:
        return ", ".join(stages_items(ranks, 2, True, [(names[ranks.rank], 0)]))
    except RunError as error:
        return str(error)


def test_a_name_that_two_stages_save_is_no_checkpoint(ranks: Pools) -> None:
    assert ranks(2).run(joined, ("one", "other"))[0] == "one, other"
    assert "two stages have one" in ranks(2).run(joined, ("one", "one"))[0]


# --- frozen stages and blocks that are left out ----------------------------------------------------------------------


def test_a_stage_that_trains_nothing_saves_and_goes_on(ranks: Pools, tmp_path: Path) -> None:
    def case(**degrees: Any) -> MeshCase:
        return MeshCase(degrees, optimizer="adamw", model="frozen")

    expected = ranks(2).run(promises.saved_after, case(pp=2), tmp_path / "state.pt")[0]
    for degrees in ({"pp": 2}, {"dp": 2, "shard": True}):
        assert ranks(2).run(promises.gone_on, case(**degrees), tmp_path / "state.pt")[0] == pytest.approx(expected)
    assert promises.gone_on(case(name="single"), tmp_path / "state.pt") == pytest.approx(expected)


class Dropping(Columns):
    """In training leaves out the first block, or the last."""

    left_out = 0

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.inner(features)
        for number, layer in enumerate(self.layers):
            if not (self.training and number == self.left_out):
                hidden = layer(hidden)
        return self.head(hidden)


def left_out(number: int) -> list[str]:
    """Returns what a stage says that is entered only past its end, or left before its beginning."""
    engine: Any = engine_of(MeshCase({"pp": 2}), Declared(seeded(Dropping), Rows(62), Rows(10)))
    model, words = engine._model, []
    model.train()
    model.left_out = number
    pipeline, batch = engine._pipeline, Rows(62).batch(0, 1)
    try:
        pipeline._computed(torch.zeros(24), (2, 12), 24, lambda model: model(batch["features"]))
    except (RunError, UserError) as error:
        words.append(str(error))
    return words


def test_a_stage_whose_neighbours_place_is_left_out_says_so(ranks: Pools) -> None:
    first, second = ranks(2).run(left_out, 2)  # where the first stage ends
    assert "left out one of its blocks" in first[0]
    assert second == []
    first, second = ranks(2).run(left_out, 1)  # where the second one begins
    assert first == []
    assert "left out one of its blocks" in second[0]


def test_a_model_without_anything_to_train_is_refused() -> None:
    def frozen() -> nn.Module:
        return Columns().requires_grad_(False)

    with pytest.raises(UserError, match="no parameter of Columns is trained"):
        engine_of(MeshCase({}), Declared(frozen, Rows(62), Rows(10)))
