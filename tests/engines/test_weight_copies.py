"""fp32 weights that 16-bit copies compute for, against loops written out in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.engines import DdpEngine, FsdpEngine
from drivetrain.config.precision import PRECISIONS
from drivetrain.config.training import Optimizer
from drivetrain.data.micro_batches import Slice
from drivetrain.engines.weight_copies import WeightCopies
from drivetrain.errors import RunError, UserError
from drivetrain.numerics.emulation import fp32_products
from tests.ranks import RankPool
from tests.tiny_workload import IGNORED, Rows, TinyWorkload, perceptron, tiny_engine

STEPS, BATCH = 8, 20
ADAMW = Optimizer(name="adamw", lr=0.01, weight_decay=0.1)
ROWS = Rows(STEPS * BATCH, ignored_share=0.15)
MASTER = PRECISIONS["bf16-master"]
Curve = tuple[list[float], list[float], dict[str, Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, input: Tensor) -> Tensor:
        return input + F.gelu(self.layer(input))


def blocks() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(8, 3))


def ours(
    engine: Any = None,
    micro: int = 5,
    precision: str = "bf16-master",
    build: Callable[[], nn.Module] = perceptron,
    **options: Any,
) -> Curve:
    """Losses, gradient norms and weights, on this rank."""
    with fp32_products(True):
        made = tiny_engine(TinyWorkload(build), precision, ADAMW, config=engine, max_grad_norm=0.5, **options)
        losses, norms = [], []
        for step in range(STEPS):
            indices = torch.arange(step * BATCH, (step + 1) * BATCH).numpy()
            window = [ROWS.micro(*p.tolist()) for p in Slice(made.data_rank, made.data_world, micro).pieces(indices)]
            losses.append(float(made.summed(made.forward_backward(window))))
            norms.append(float(made.optimizer_step(1.0).grad_norm))
        return losses, norms, {name: weight.clone() for name, weight in made.weights().items()}


def plain(compute: torch.dtype, micro: int, scale: float = 1.0, world: int = 1) -> Curve:
    """A 16-bit model beside fp32 weights, written out: its gradients are added to theirs, its weights are theirs.

    world: ranks whose micro-batches it computes, one after the other.
    """
    master = perceptron()
    small = copy.deepcopy(master).to(compute)
    pairs = list(zip(master.parameters(), small.parameters(), strict=True))
    groups = [
        {"params": [p for p in master.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in master.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    losses, norms = [], []
    for indices in torch.arange(STEPS * BATCH).split(BATCH):
        count = (ROWS.labels[indices] != IGNORED).sum()
        losses.append(0.0)
        for piece in [p for rank in range(world) for p in Slice(rank, world, micro).pieces(indices.numpy())]:
            logits = small(ROWS.features[piece].to(compute)).float()
            loss = F.cross_entropy(logits, ROWS.labels[piece], ignore_index=IGNORED, reduction="sum") / count
            (loss * scale).backward()
            losses[-1] += loss.item()
            for weight, own in pairs:
                assert own.grad is not None
                gradient = own.grad.float() / scale
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
                own.grad = None
        norms.append(nn.utils.clip_grad_norm_(master.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, own in pairs:
                own.copy_(weight)
    return losses, norms, master.state_dict()


def assert_same(found: Curve, expected: Curve, tolerance: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1] == pytest.approx(expected[1], rel=tolerance)
    for name, weight in expected[2].items():
        torch.testing.assert_close(found[2][name], weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("micro", [20, 5])
def test_one_process_has_the_curve_of_a_plain_loop(micro: int) -> None:
    with fp32_products(True):
        expected = plain(torch.bfloat16, micro)
    found = ours(micro=micro)
    assert_same(found, expected, 1e-5)
    assert found[0] != pytest.approx(ours(precision="fp32")[0], rel=1e-4), "products really are rounded"
    assert found[0] != pytest.approx(ours(precision="bf16")[0], rel=1e-4), "weights are not"
    assert all(weight.dtype == torch.float32 for weight in found[2].values())


def test_fp16_copies_scale_the_loss() -> None:
    with fp32_products(True):
        expected = plain(torch.float16, 5, scale=65536.0)
    assert_same(ours(precision="fp16-master"), expected, 1e-5)


def test_recomputed_blocks_find_the_copies_again() -> None:
    assert_same(ours(recompute=True, build=blocks), ours(build=blocks), 0)


ENGINES = (DdpEngine(), DdpEngine(shard_optimizer=True), FsdpEngine())


def of_ranks() -> list[Curve]:
    return [ours(engine) for engine in ENGINES]


def gone_on(state: Any, engine: Any = None, precision: str = "bf16-master") -> float:
    """The loss of a step after what was saved."""
    with fp32_products(True):
        made = tiny_engine(TinyWorkload(perceptron), precision, ADAMW, config=engine)
        made.load_state_dict(copy.deepcopy(state))
        indices = torch.arange(20, 40).numpy()
        window = [ROWS.micro(*p.tolist()) for p in Slice(made.data_rank, made.data_world, 5).pieces(indices)]
        return float(made.summed(made.forward_backward(window)))


def gone_on_by_ranks(state: Any) -> list[float]:
    return [gone_on(state, engine) for engine in ENGINES]


def test_a_checkpoint_holds_fp32_weights_and_other_engines_and_precisions_go_on_from_it(
    ranks: Callable[[int], RankPool],
) -> None:
    with fp32_products(True):
        engine = tiny_engine(TinyWorkload(perceptron), "bf16-master", ADAMW)
        engine.forward_backward([ROWS.micro(*range(20))])
        engine.optimizer_step(1.0)
        state = copy.deepcopy(engine.state_dict())
        window = [ROWS.micro(*range(start, start + 5)) for start in range(20, 40, 5)]
        expected = float(engine.forward_backward(window))
    moments = [v for own in state["optimizer"]["state"].values() for v in own.values()]
    assert all(tensor.dtype == torch.float32 for tensor in (*state["model"].values(), *moments))
    assert gone_on(state) == expected, "to the bit"
    assert gone_on(state, precision="fp32") == pytest.approx(expected, rel=1e-2)
    for found in ranks(2).run(gone_on_by_ranks, state):
        assert found == pytest.approx([expected] * len(ENGINES), rel=1e-5)


def test_ddp_and_fsdp_have_the_curve_of_a_plain_loop(ranks: Callable[[int], RankPool]) -> None:
    with fp32_products(True):
        expected = plain(torch.bfloat16, 5, world=2)
    for (losses, norms, weights), _ in zip(*ranks(2).run(of_ranks), strict=True):
        assert losses[:4] == pytest.approx(expected[0][:4], rel=1e-5)
        assert norms[:4] == pytest.approx(expected[1][:4], rel=2e-4)
        # later a last bit of a sum in fp32 has a weight rounded to the next 16-bit number
        assert_same((losses, norms, weights), expected, 2e-3)


# --- what a window holds ----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight


def test_tied_weights_share_a_copy_whose_gradient_reaches_them_in_fp32() -> None:
    model = Tied()
    copies = WeightCopies(model, MASTER)
    with copies.in_place(copies.made()):
        assert model.embed.weight is model.out.weight
        assert model.embed.weight.dtype == torch.bfloat16
        model.out(model.embed(torch.tensor([1, 2]))).sum().backward()
    assert isinstance(model.embed.weight, nn.Parameter)
    assert model.embed.weight is model.out.weight
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad.dtype == torch.float32


def test_the_weights_are_back_whatever_happens() -> None:
    model = perceptron()
    before = dict(model.named_parameters())
    copies = WeightCopies(model, MASTER)
    with pytest.raises(KeyError), copies.in_place(copies.made()):
        raise KeyError
    assert all(after is before[name] for name, after in model.named_parameters())


def test_a_precision_without_copies_leaves_the_parameters() -> None:
    for precision in (None, PRECISIONS["bf16-mixed"]):
        model = perceptron()
        copies = WeightCopies(model, precision)
        with copies.in_place(copies.made()):
            assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_compute_with_their_copies(kind: type[nn.RNNBase]) -> None:
    layer, inputs = kind(4, 4), torch.randn(2, 3, 4)
    plain_layer = copy.deepcopy(layer).bfloat16()
    copies = WeightCopies(layer, MASTER)
    with copies.in_place(copies.made()):
        found, _ = layer(inputs.bfloat16())
        found.sum().backward()
    expected, _ = plain_layer(inputs.bfloat16())
    assert torch.equal(found, expected)
    assert layer.weight_ih_l0.grad is not None
    assert layer(inputs)[0].dtype == torch.float32


@pytest.mark.parametrize("trains", [True, False])
def test_normalisation_with_running_statistics_stays_in_fp32(trains: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(trains)
    copies = WeightCopies(model, MASTER)
    with copies.in_place(copies.made()):
        found = model(torch.randn(2, 3, 5, 5).bfloat16())
        assert model[0].weight.dtype == torch.bfloat16
        assert model[1].weight.dtype == torch.float32
    assert found.dtype == torch.bfloat16


def test_evaluation_and_prediction_compute_with_copies() -> None:
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(self.weight.dtype)
            return super().forward(input)

    evaluation = Rows(12, seed=3)
    work = TinyWorkload(lambda: Watched(8, 3), Rows(8), evaluation)
    engine = tiny_engine(work, "bf16-master")
    batches = [evaluation.micro(0, 1, 2), evaluation.micro(3, 4)]
    engine.evaluate(batches, {})
    for _ in engine.predict(batches):
        assert all(weight.dtype == torch.float32 for weight in engine.weights().values())
    assert seen == [torch.bfloat16] * 4


def test_copies_are_made_once_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(TinyWorkload(perceptron), "bf16-master")
    made, real = [], WeightCopies.made
    monkeypatch.setattr(WeightCopies, "made", lambda self: (made.append(1), real(self))[1])
    engine.forward_backward([ROWS.micro(0, 1), ROWS.micro(2, 3), ROWS.micro(4)])
    assert made == [1]


def test_a_weight_that_the_model_changes_while_it_computes_is_no_silent_loss() -> None:
    copies = WeightCopies(nn.Embedding(4, 3, max_norm=0.1), PRECISIONS["bf16-master"])
    module = copies._slots[0][0]
    with pytest.raises(RunError, match=r"would be lost\. Give bf16-mixed"), copies.in_place(copies.made()):
        module(torch.tensor([1]))


@pytest.mark.parametrize(
    "module",
    [nn.Embedding(4, 3, sparse=True), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))],
    ids=["sparse gradients", "spectral norm"],
)
def test_layers_that_cannot_compute_with_copies_are_refused(module: nn.Module) -> None:
    with pytest.raises(UserError, match="give bf16-mixed"):
        WeightCopies(nn.Sequential(module), PRECISIONS["bf16-master"])
