"""A loss of several terms, cut anyhow: each term divides by its own count, and rows come in the batch's order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.window_loss import combined, gathered_statistics, joined_partials
from drivetrain.errors import RunError
from drivetrain.workloads.base import Batch, Outputs
from drivetrain.workloads.loss_contract import LossContext, Partial
from tests.tiny_workload import Rows, TinyWorkload, tiny_engine

CPU = torch.device("cpu")
PAIRS, TOKENS = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 5.0])  # the loss of each pair; its tokens, of loss 1 each


def scale() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


class Pairs(TinyWorkload):
    """A term for each pair, and one for each token."""

    @property
    def terms(self) -> Mapping[str, float]:
        return {"pairs": 1.0, "tokens": 1.0}

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return {"pairs": len(batch["pairs"]), "tokens": int(batch["tokens"].sum())}

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        del context
        pairs, tokens = (model(batch[name][:, None]).sum() for name in ("pairs", "tokens"))
        return {"pairs": pairs, "tokens": tokens}

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        found, counts = self.loss_sums(model, batch, LossContext()), self.counts(batch)
        nothing = torch.zeros(0)
        return Outputs(nothing.sum(), 0, nothing, nothing, {name: (found[name], counts[name]) for name in found})


class OneDivisor(Pairs):
    """The same with one sum and one count: pairs' mean within a micro-batch, counted as often as it has tokens."""

    @property
    def terms(self) -> Mapping[str, float]:
        return {"loss": 1.0}

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return {"loss": int(batch["tokens"].sum())}

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        found = super().loss_sums(model, batch, context)
        return {"loss": found["pairs"] / len(batch["pairs"]) * batch["tokens"].sum() + found["tokens"]}


def micro(*samples: int) -> MicroBatch:
    chosen = list(samples)
    return MicroBatch({"pairs": PAIRS[chosen], "tokens": TOKENS[chosen]}, positions=np.array(chosen))


def loss(kind: type[TinyWorkload], *window: MicroBatch) -> float:
    engine = tiny_engine(kind(scale))
    return engine.forward_backward(window).item()


def test_terms_with_divisors_of_their_own_do_not_depend_on_the_cut() -> None:
    assert loss(Pairs, micro(0, 1)) == pytest.approx(3.0)
    assert loss(Pairs, micro(0), micro(1)) == pytest.approx(3.0)
    assert loss(OneDivisor, micro(0, 1)) == pytest.approx(3.0)
    assert loss(OneDivisor, micro(0), micro(1)) == pytest.approx(3.43, abs=0.005), "what one divisor gives"


def test_each_terms_mean_is_known_by_name_and_a_filler_counts_for_nothing() -> None:
    engine = tiny_engine(Pairs(scale))
    filler = MicroBatch(micro(1).tensors, counts=False)
    engine.forward_backward([micro(0), micro(1), filler])
    assert engine.term_shares is not None
    assert dict(zip(engine.term_names, engine.term_shares.tolist(), strict=True)) == {"pairs": 2.0, "tokens": 1.0}
    assert engine.gradients()["weight"].item() == pytest.approx(3.0)
    values = engine.evaluate([micro(0), micro(1), filler], {})
    assert values == pytest.approx({"loss": 3.0, "loss_pairs": 2.0, "loss_tokens": 1.0})


def test_one_term_has_no_shares_of_its_own() -> None:
    engine = tiny_engine(TinyWorkload(lambda: nn.Linear(8, 3), Rows(20)))
    engine.forward_backward([Rows(20).micro(0, 1)])
    assert engine.term_shares is None


def test_rows_are_gathered_in_the_order_of_the_global_batch() -> None:
    first = [MicroBatch({"x": torch.zeros(2)}, positions=np.array([0, 3])), MicroBatch({"x": torch.zeros(1)}, False)]
    other = [MicroBatch({"x": torch.zeros(2)}, positions=np.array([2, 1]))]
    ranks = [
        joined_partials([partial(0, 3), partial(9)], first),
        joined_partials([partial(2, 1)], other),
    ]
    found, filler = combined(ranks, first, CPU)
    assert found.rows["reward"].tolist() == [0, 1, 2, 3]
    assert found.sums["total"].item() == 6
    assert (found.own.tolist(), filler.own.tolist()) == ([0, 3], [0])  # type: ignore[union-attr]


def test_a_statistic_that_leaves_out_a_samples_row_is_refused() -> None:
    window = [MicroBatch({"x": torch.zeros(2)}, positions=np.array([0, 1]))]
    with pytest.raises(RunError, match="the statistic reward has 1 rows, of a global batch of 2 samples"):
        gathered_statistics([partial(0)], window, True, Communicator(), CPU)


def partial(*rewards: Any) -> Partial:
    rows = torch.tensor([float(reward) for reward in rewards])
    return Partial(sums={"total": rows.sum()}, rows={"reward": rows})
