"""Activations in CPU memory: same gradients, and nothing of what blocks saved is left where it was computed.

Without a GPU both places are CPU memory; the copies, and what is freed, are the same.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from drivetrain.errors import UserError
from drivetrain.memory import offload
from drivetrain.memory.offload import Copies, Offload, offload_activations
from drivetrain.memory.recompute import apply_recompute, repeated_blocks

ROWS, WIDTH, BLOCKS = 48, 16, 6


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)  # torch 2.11 saves an empty tensor beside each recomputed block


class Block(nn.Module):
    """Two layers save one input; the factor is the same for all blocks; one of the weights is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.two.requires_grad_(False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor, factor: Tensor) -> Tensor:
        inner = self.dropout(nn.functional.gelu(self.one(hidden)) * self.two(hidden))
        return hidden + self.three(inner) * factor


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("factor", torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)))

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for block in self.blocks:
            hidden = block(hidden, self.factor)
        return hidden


def features() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def gradients(model: nn.Module, device: str = "cpu") -> dict[str, Tensor]:
    torch.manual_seed(1)
    model(features().to(device)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def saved_by_blocks(model: Deep) -> int:
    """Bytes of what autograd keeps of the blocks, each tensor once, but for weights and what blocks are given alike."""
    stay = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in stay:
            kept[storage] = tensor.detach()
        return tensor.detach()

    hidden = model.first(features())
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        for block in model.blocks:
            hidden = block(hidden, model.factor)
    return sum(tensor.nbytes for tensor in kept.values())


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.equal(ours[name], gradient), name


def test_gradients_are_the_same_and_all_that_blocks_save_is_moved_once() -> None:
    model = Deep()
    moved = offload_activations(model, repeated_blocks(model))
    assert_same(gradients(model), gradients(Deep()))
    assert moved.moved_bytes == saved_by_blocks(Deep())


def test_with_recompute_the_inputs_of_the_blocks_alone_are_moved() -> None:
    model = Deep()
    apply_recompute(model)
    moved = offload_activations(model, repeated_blocks(model))
    assert_same(gradients(model), gradients(Deep()))
    assert moved.moved_bytes == BLOCKS * ROWS * WIDTH * 4


def test_what_was_moved_is_freed_before_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, originals = Deep(), list[StorageWeakRef]()
    moving = Offload._moved

    def remembered(self: Offload, tensor: Tensor) -> Tensor:
        originals.append(StorageWeakRef(tensor.untyped_storage()))
        return moving(self, tensor)

    monkeypatch.setattr(Offload, "_moved", remembered)
    offload_activations(model, repeated_blocks(model))
    found = model(features())
    assert len(originals) > 3 * BLOCKS
    assert all(original.expired() for original in originals)
    found.sum().backward()


def test_small_tensors_stay_and_nothing_is_moved_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep()
    moved = offload_activations(model, repeated_blocks(model))
    with torch.no_grad():
        model(features())
    assert moved.moved_bytes == 0
    monkeypatch.setattr(offload, "LEAST_BYTES", ROWS * 40 * 4 + 1)
    assert_same(gradients(model), gradients(Deep()))
    assert moved.moved_bytes == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_give_up_what_they_save_too(recompute: bool) -> None:
    def made() -> Deep:
        model = Deep()
        for block in model.blocks:
            assert isinstance(block, Block)
            block.dropout.p = 0.0  # compiled code draws other masks
        return model

    model = made()
    if recompute:
        apply_recompute(model)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    moved = offload_activations(model, repeated_blocks(model))
    theirs, ours = gradients(made()), gradients(model)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient)
    assert moved.moved_bytes >= BLOCKS * ROWS * WIDTH * 4
    assert moved.moved_bytes <= saved_by_blocks(made()) + BLOCKS * ROWS * WIDTH * 4  # weights would be more


def test_a_model_without_repeated_blocks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"offload_activations: .* no repeated blocks"):
        offload_activations(model, repeated_blocks(model))


class Late(Copies):
    """A device's stream that copies as late as it may: when the computation waits for it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, target: Tensor, source: Tensor) -> Any:
        self.log.append("begin")
        return weakref.ref(source), target, StorageWeakRef(source.untyped_storage())

    def wait(self, begun: Any) -> None:
        source, target, storage = begun
        self.log.append("wait")
        assert not storage.expired(), "memory that a copy still reads was given back"
        assert source() is not None
        target.copy_(source())


@pytest.mark.parametrize("recompute", [False, True])
def test_copies_that_run_late_move_the_same_numbers(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, late = Deep(), Late()
    if recompute:
        apply_recompute(model)
    monkeypatch.setattr(offload, "Copies", lambda: late)
    moved = offload_activations(model, repeated_blocks(model))
    expected = gradients(Deep())
    for _ in range(2):  # windows
        assert_same(gradients(model), expected)
        model.zero_grad()
    assert late.log.count("begin") == late.log.count("wait")
    assert moved.moved_bytes > 0
    assert not moved._left
    assert not moved._leaving


def test_what_a_block_needs_comes_while_the_block_after_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, late = Deep(), Late()
    apply_recompute(model)  # one tensor a block
    monkeypatch.setattr(offload, "Copies", lambda: late)
    offload_activations(model, repeated_blocks(model))
    found = model(features())
    assert late.log == ["begin", "begin", *["wait", "begin"] * (BLOCKS - 2)], "held for two blocks, no more"
    late.log.clear()
    found.sum().backward()
    left, own_and_the_one_before, come_one_by_one = ["wait"] * 2, ["begin"] * 2 + ["wait"], ["begin", "wait"]
    assert late.log == [*left, *own_and_the_one_before, *come_one_by_one * (BLOCKS - 2), "wait"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's memory is measured")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_gpu_needs_less_memory_for_the_same_gradients(recompute: bool) -> None:
    def run(offloads: bool) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        # wide inputs and few gradients: of recomputed blocks the inputs are what is kept
        inner = 64 if recompute else 2048
        blocks = (nn.Sequential(nn.Linear(512, inner), nn.GELU(), nn.Linear(inner, 512)) for _ in range(16))
        model: Any = nn.Sequential(*blocks).cuda()
        if recompute:
            apply_recompute(model)
        if offloads:
            offload_activations(model, repeated_blocks(model))
        features = torch.randn(8192, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        gc.collect()  # what earlier ones left in cycles would be freed in between
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(features).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        return grads, torch.cuda.max_memory_allocated() - before

    (plain, peak), (moved, less) = run(False), run(True)
    assert_same(moved, plain)
    assert less < 0.6 * peak
