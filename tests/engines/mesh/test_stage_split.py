"""Tests where a model is cut, and that its parts in turn compute what the whole did, under the same names."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification
from transformers import AutoModelForSequenceClassification as Classifier

from drivetrain.engines.mesh.block_discovery import Anatomy, balanced, dissect
from drivetrain.engines.mesh.stage_split import Link, Reached, cut
from drivetrain.errors import UserError

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}


def config(model_type: str, **fields: Any) -> Any:
    return AutoConfig.for_model(model_type, **fields)


def llama() -> nn.Module:
    return AutoModelForCausalLM.from_config(config("llama", vocab_size=50, num_key_value_heads=2, **SMALL))


def gpt2() -> nn.Module:
    fields = {"vocab_size": 50, "n_embd": 16, "n_layer": 4, "n_head": 2, "tie_word_embeddings": False}
    return AutoModelForCausalLM.from_config(config("gpt2", **fields))


def bert() -> nn.Module:
    return Classifier.from_config(config("bert", vocab_size=50, **SMALL))


def vit() -> nn.Module:
    return AutoModelForImageClassification.from_config(config("vit", image_size=8, patch_size=4, **SMALL))


def token_batches() -> list[dict[str, Tensor]]:
    ids = torch.arange(3 * 7).reshape(3, 7) % 50
    return [{"input_ids": ids[:2, :5]}, {"input_ids": ids}]


def image_batches() -> list[dict[str, Tensor]]:
    return [{"pixel_values": torch.ones(n, 3, 8, 8) * torch.arange(8)} for n in (2, 3)]


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**batch).logits
    return found


class Measured(nn.Module):
    """Statistics without weights before, within and after its blocks, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.before = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)) for _ in range(4))
        self.after = nn.BatchNorm1d(4, affine=False)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        hidden = self.before(self.first(x)) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return type("Output", (), {"logits": self.after(hidden)})


def rows() -> list[dict[str, Tensor]]:
    return [{"x": torch.arange(4 * n).reshape(n, 4) / 8} for n in (2, 3)]


def tied() -> nn.Module:
    return AutoModelForCausalLM.from_config(config("gpt2", vocab_size=50, n_embd=16, n_layer=4, n_head=2))


class HeadFirst(nn.Module):
    """Its head stands before the embedding that it shares its weight with, which lies in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 50, bias=False)
        self.start = nn.ModuleDict({"words": nn.Embedding(50, 4)})
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.start["words"].weight = self.head.weight

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        hidden = self.start["words"](input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return type("Output", (), {"logits": self.head(hidden)})


MODELS = {
    "tied": (tied, token_batches),
    "head first": (HeadFirst, token_batches),
    "measured": (Measured, rows),
    "llama": (llama, token_batches),
    "gpt2": (gpt2, token_batches),
    "bert": (bert, token_batches),
    "vit": (vit, image_batches),
}


def dissected(model: nn.Module, batches: list[dict[str, Tensor]]) -> Anatomy:
    model.eval()
    return dissect(model, batches, logits)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_stages_in_turn_compute_what_the_whole_model_did_and_share_out_its_names(name: str, stages: int) -> None:
    build, make = MODELS[name]
    torch.manual_seed(0)
    whole, batches = build(), make()
    anatomy = dissected(whole, batches)
    expected = [logits(whole, batch) for batch in batches]
    names: list[str] = []
    hidden = [torch.empty(0)] * len(batches)
    for own in balanced(anatomy.costs, stages):
        torch.manual_seed(0)
        part, link = build().eval(), Link()
        spoken_for = cut(part, anatomy, own, link)
        assert spoken_for <= part.state_dict().keys()
        names += spoken_for
        for number, batch in enumerate(batches):
            link.received = hidden[number]
            try:
                assert torch.equal(logits(part, batch), expected[number])
            except Reached as reached:
                hidden[number] = reached.hidden
            assert tuple(hidden[number].shape) == anatomy.hidden.of(batch)
    assert sorted(names) == sorted(whole.state_dict()), "each is one stage's to save"


def test_what_runs_before_the_blocks_is_the_first_stages_and_what_runs_after_them_the_last() -> None:
    anatomy = dissected(llama(), token_batches())
    assert anatomy.before == ["model.embed_tokens"]
    assert anatomy.after == ["model.norm", "lm_head"]
    assert anatomy.blocks == [f"model.layers.{i}" for i in range(4)]
    assert anatomy.hidden.length_of == "input_ids"
    assert dissected(vit(), image_batches()).hidden.length_of is None, "as many patches in every batch"


def test_the_head_counts_among_the_costs_of_the_last_block() -> None:
    costs = dissected(llama(), token_batches()).costs
    assert costs[0] == costs[1] == costs[2]
    head = 2 * 2 * 5 * 16 * 50  # two operations a product: (2, 5, 16) x (16, 50)
    assert costs[3] - costs[2] == head


class Skipping(nn.Module):
    """Its blocks add to a sum instead of handing on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return type("Output", (), {"logits": sum(block(x) for block in self.blocks)})


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Any:
        return type("Output", (), {"logits": self.blocks(x + self.shift)})


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return type("Output", (), {"logits": self.one(x)})


class SharedBlock(nn.Module):
    """Its head is one of its blocks' layers again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.blocks[1][0].weight

    def forward(self, x: Tensor) -> Any:
        return type("Output", (), {"logits": self.head(self.blocks(x))})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (SharedBlock, "blocks.1.0.weight and head.weight are one weight"),
        (Skipping, "do not hand one tensor"),
        (Loose, "shift belong to no layer"),
        (Flat, "no repeated blocks"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dissected(build(), [{"x": torch.ones(n, 4)} for n in (2, 3)])


@pytest.mark.parametrize("build", [tied, HeadFirst])
def test_both_ends_keep_a_tied_weight_under_all_its_names_and_stages_between_them_do_not(
    build: Callable[[], nn.Module],
) -> None:
    anatomy = dissected(build(), token_batches())
    [name] = anatomy.tied
    names = [n for n, p in build().state_dict().items() if p.shape == (50, build().get_parameter(name).shape[1])]
    assert len(names) == 2
    for own in balanced(anatomy.costs, 3):
        part = build()
        cut(part, anatomy, own, Link())
        held = [n for n in names if n in part.state_dict()]
        if own.start > 0 and own.stop < 4:
            assert held == []
            continue
        assert held == names
        assert part.get_parameter(names[0]) is part.get_parameter(names[1])
        assert name in dict(part.named_parameters()), "the optimizer knows it by one name on both ends"


class Borrowing(nn.Module):
    """After its blocks it computes with a weight of what runs before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        assert self.first.weight.shape == (4, 4)
        hidden = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        return type("Output", (), {"logits": nn.functional.linear(self.head(hidden), self.first.weight.t())})


def test_a_weight_of_another_stage_answers_for_its_shape_and_takes_part_in_nothing() -> None:
    model, link = Borrowing(), Link()
    anatomy = dissected(model, rows())
    cut(model, anatomy, range(1, 2), link)
    link.received = torch.ones(2, 4)
    with pytest.raises(UserError, match=r"engine\.pp: a weight of the layers before the blocks is used after them"):
        logits(model, rows()[0])


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=8), stages=st.integers(1, 8))
def test_no_other_cut_has_a_cheaper_dearest_stage(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    found = balanced(costs, stages)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert all(len(part) for part in found)

    def dearest(ends: tuple[int, ...]) -> int:
        edges = [0, *ends, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    best = min(map(dearest, itertools.combinations(range(1, len(costs)), stages - 1)))
    assert max(sum(costs[part.start : part.stop]) for part in found) == best
