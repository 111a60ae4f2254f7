"""A plan of the user's for tensor parallelism: what does not fit the model is reported before anything is split."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import nn

from drivetrain.engines.mesh.declared_plan import check_declared
from drivetrain.errors import UserError
from tests.parity.mesh_cases import Columns

PAIR = {"layers.*.wide": "colwise", "layers.*.back": "rowwise"}


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))


def reported(plan: Mapping[str, str], model: nn.Module | None = None) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as caught:
        check_declared(model or Columns(), plan)
    return [(each.why, each.fix) for each in caught.value.problems]


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def test_plans_that_fit_are_let_through() -> None:
    check_declared(Columns(), PAIR)
    check_declared(Columns(), {**PAIR, "layers.*.norm": "replicated_with_grad_allreduce", "inner": "replicate"})
    check_declared(Columns(), {"inner": "colwise_rep", "head": "rowwise_split_input"})
    check_declared(sequential(), {"0": "colwise", "2": "rowwise"})
    blocks = {"blocks.*.linear1": "colwise", "blocks.*.linear2": "rowwise"}
    check_declared(Text(), {"words": "embedding_rowwise", **blocks})


def test_a_slip_in_a_name_or_a_style_is_reported_with_the_nearest_and_all_come_at_once() -> None:
    [(name, layer), (style, known)] = reported({"layers.*.wid": "colwise", "layers.*.back": "row"})
    assert name == "layers.*.wid is the name of no layer of Columns"
    assert "did you mean layers.*.wide" in layer
    assert style == "layers.*.back is given the style 'row', which there is not"
    assert known == "did you mean rowwise?"


def test_where_nothing_is_near_what_there_is_is_listed() -> None:
    [(_, styles), (_, layers)] = reported({"zzz": "foo"})
    assert styles.startswith("there are colwise, rowwise, ")
    assert layers == "there are inner, layers.*.wide, layers.*.back, head"


def test_a_layer_of_another_kind_is_reported_with_what_can_be_split() -> None:
    assert reported({"layers.*.norm": "colwise"})[0][0] == "layers.0.norm is of type LayerNorm; colwise splits Linear"
    assert reported({"layers.*": "colwise"})[0][1] == "name its layers: layers.*.wide, layers.*.back"
    [(_, embedding), (_, linear)] = reported({"words": "colwise", "head": "embedding_rowwise"}, Text())
    assert embedding.endswith("embedding_rowwise")
    assert linear.endswith("colwise, rowwise, colwise_gather_output, rowwise_split_input")


@pytest.mark.parametrize(
    ("given", "missing", "instead"),
    [("wide", "back", "colwise_gather_output"), ("back", "wide", "rowwise_split_input")],
)
def test_half_a_pair_is_reported_once_with_its_other_half(given: str, missing: str, instead: str) -> None:
    name = f"layers.*.{given}"
    [(why, fix)] = reported({name: PAIR[name]})
    assert why.startswith(f"{name} ({PAIR[name]})")
    assert f"such as layers.*.{missing}" in fix
    assert f"or take {instead}" in fix


def test_half_a_pair_is_reported_with_where_no_block_repeats() -> None:
    [(why, _)] = reported({"0": "colwise"}, sequential())
    assert why.startswith("0 (colwise)")


def test_pairs_over_two_blocks_are_left_to_the_trial_step() -> None:
    """Down and up again, as in a U-Net."""
    model = nn.Module()
    model.down = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU()) for _ in range(2))
    model.up = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.ReLU()) for _ in range(2))
    check_declared(model, {"down.*.0": "colwise", "up.*.0": "rowwise"})
