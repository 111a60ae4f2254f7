from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.generation.short_step import short_step_of
from drivetrain.memory.recompute import apply_recompute
from drivetrain.models.language_head import TargetHead
from drivetrain.models.llama_form import FORM
from drivetrain.models.packed_attention import bounds_of, use_packed_attention
from drivetrain.models.packed_scores import use_packed_scores
from drivetrain.models.read_places import compute_every_place, keys_seen

VOCABULARY, IGNORED = 60, -100
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LENGTHS = (5, 1, 9, 12)


def build(kind: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(0)
    own = {"sliding_window": 4} if kind == "mistral" else {}
    config = transformers.CONFIG_MAPPING[kind](**SIZES, **own, **fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def classifier() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, num_labels=1))


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def targets_of(ids: Tensor, every: int) -> Tensor:
    """Returns the token after each, at one of `every` places, the last among them."""
    found = ids.roll(-1)
    found[torch.arange(len(ids) - 1, -1, -1) % every != 0] = IGNORED
    return found


def row(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return {"input_ids": torch.cat(list(parts))[None], "position_ids": positions[None]}


def plain_loss(model: Any, parts: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """The loss of Transformers' model as it is, text by text."""
    losses = [
        F.cross_entropy(model(input_ids=part[None]).logits[0], target, ignore_index=IGNORED, reduction="sum")
        for part, target in zip(parts, targets, strict=True)
    ]
    return torch.stack(losses).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@contextmanager
def places_computed(model: nn.Module, part: str) -> Iterator[list[list[int]]]:
    """Collects for each block how many places reach a part of it."""
    found: list[list[int]] = [[] for _ in range(SIZES["num_hidden_layers"])]
    modules = [module for name, module in model.named_modules() if name.endswith(part)]
    hooks = [
        module.register_forward_pre_hook(lambda _, args, own=own: own.append(args[0].shape[:-1].numel()))
        for module, own in zip(modules, found, strict=True)
    ]
    yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("every", [1, 3, 20])
@pytest.mark.parametrize("kind", FORM)
def test_losses_and_gradients_are_those_of_transformers(kind: str, every: int) -> None:
    model, other = build(kind), build(kind)
    assert use_packed_attention(model, "auto") is not None
    head = TargetHead(model, False)
    parts = texts()
    targets = [targets_of(part, every) for part in parts]
    inputs, wanted = row(parts), torch.cat(targets)[None]
    with places_computed(model, "down_proj") as computed:
        loss = head.loss_sum(model, inputs, wanted)
    read = int((wanted != IGNORED).sum())
    assert computed == [[sum(LENGTHS)], [read]]
    expected = plain_loss(other, parts, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_same(gradients(model, loss), gradients(other, expected))


def test_padded_rows_are_read_at_their_targets_too() -> None:
    model, other = build(), build()
    head = TargetHead(model, False)
    parts = [torch.arange(1, 7), torch.arange(20, 26)]
    targets = [targets_of(part, 2) for part in parts]
    with places_computed(model, "o_proj") as computed:
        loss = head.loss_sum(model, {"input_ids": torch.stack(parts)}, torch.stack(targets))
    assert computed == [[12], [6]]
    expected = plain_loss(other, parts, targets)
    torch.testing.assert_close(loss, expected)
    assert_same(gradients(model, loss), gradients(other, expected))


def test_scores_are_computed_where_they_are_read_alone() -> None:
    model, other = classifier(), classifier()
    assert use_packed_scores(model, "auto", print) is not None
    parts = texts()[2:]
    ends = torch.tensor([8, 20])
    queries: list[int] = []
    usual = F.scaled_dot_product_attention

    def counting(query: Tensor, *args: Any, **how: Any) -> Tensor:
        queries.append(query.shape[2])
        return usual(query, *args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", counting)
        found = model(**row(parts), ends=ends).logits
    assert queries == [9, 12, 2]  # of the first block those of each text, of the last one the two that are read
    expected = torch.cat([other(input_ids=part[None]).logits for part in parts])
    torch.testing.assert_close(found, expected)
    assert_same(gradients(model, found.square().sum()), gradients(other, expected.square().sum()))


def test_a_place_sees_its_own_sequence_the_window_and_what_a_branch_shares() -> None:
    # two sequences, 0 to 2 and 3 to 5; a branch of the second that shares its first two positions, at 6 and 7
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 2, 3]])
    bounds = bounds_of(positions)
    assert bounds is not None
    seen = keys_seen(bounds, torch.tensor([2, 4, 7, 6]), None)
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0, 1, 2], [3, 4], [3, 4, 6, 7], [3, 4, 6]]
    apart = bounds_of(positions[:, :6])
    assert apart is not None
    windowed = keys_seen(apart, torch.tensor([2, 5]), 2)
    assert [row.nonzero().flatten().tolist() for row in windowed] == [[1, 2], [4, 5]]


def test_a_block_that_recomputes_computes_every_place() -> None:
    model, other = build(), build()
    heads = [TargetHead(each, False) for each in (model, other)]
    apply_recompute(model)
    ids = torch.arange(1, 13)[None]
    targets = targets_of(ids[0], 3)[None]
    with places_computed(model, "down_proj") as computed:
        found = gradients(model, heads[0].loss_sum(model, {"input_ids": ids}, targets))
    assert computed == [[12, 12], [12, 12]]  # again in the backward pass
    assert_same(found, gradients(other, heads[1].loss_sum(other, {"input_ids": ids}, targets)))


def test_a_block_that_drops_out_computes_every_place_while_it_trains() -> None:
    model = build()
    block = model.model.layers[-1]
    block.mlp.down_proj = nn.Sequential(nn.Dropout(0.5), block.mlp.down_proj)
    head = TargetHead(model, False)
    ids = torch.arange(1, 13)[None]
    for trains, expected in ((True, 12), (False, 4)):
        with places_computed(model.train(trains), "gate_proj") as computed:
            head.loss_sum(model, {"input_ids": ids}, targets_of(ids[0], 3)[None])
        assert computed == [[12], [expected]]


def test_a_copy_reads_what_is_asked_of_it_and_what_is_undone_reads_everything() -> None:
    model = build()
    head = TargetHead(model, False)
    reference = copy.deepcopy(model)
    ids = torch.arange(1, 13)[None]
    targets = targets_of(ids[0], 3)[None]
    for each in (model, reference):
        with places_computed(each, "down_proj") as computed:
            head.loss_sum(each, {"input_ids": ids}, targets)
        assert computed == [[12], [4]]
    compute_every_place(reference)
    with places_computed(reference, "down_proj") as computed:
        head.loss_sum(reference, {"input_ids": ids}, targets)
    assert computed == [[12], [12]]


def test_without_a_loss_every_place_is_computed_and_answers_keep_their_short_step() -> None:
    model = build().eval()
    TargetHead(model, False)
    ids = torch.arange(1, 13)[None]
    with places_computed(model, "down_proj") as computed:
        torch.testing.assert_close(model(input_ids=ids).logits, build().eval()(input_ids=ids).logits)
    assert computed == [[12], [12]]
    assert short_step_of(model) is not None
    model.model.layers[-1].mlp.register_forward_hook(lambda *_: None)
    assert short_step_of(model) is None


def test_other_forms_compute_every_place() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    TargetHead(model, False)
    assert not any(name.endswith("mlp") and module._forward_hooks for name, module in model.named_modules())
