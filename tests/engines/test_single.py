"""The single engine against training loops written out in plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.precision import PRECISIONS
from drivetrain.config.training import Optimizer, Scaler
from drivetrain.data.loader import MicroBatch
from drivetrain.data.micro_batches import Slice
from drivetrain.engines.single import SingleEngine
from drivetrain.numerics.emulation import fp32_products
from drivetrain.workloads.base import Batch
from tests.device import chosen_device, on
from tests.tiny_workload import FEATURES, IGNORED, Rows, TinyWorkload, perceptron
from tests.tiny_workload import tiny_engine as engine_on

STEPS = 14
SGD = Optimizer(name="sgd", lr=0.5, momentum=0.9)
ADAMW = Optimizer(name="adamw", lr=0.01, weight_decay=0.1)
ROWS = Rows(90, ignored_share=0.15)
DEVICE = chosen_device()

pytestmark = pytest.mark.usefixtures("device")
tiny_engine = functools.partial(engine_on, device=DEVICE)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Curve:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def global_batches(steps: int = STEPS) -> Iterator[Tensor]:
    """Sample indices of each step: 20 of 90, the last batch of an epoch 10."""
    epochs = (torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(e)).split(20) for e in range(steps))
    for _, batch in zip(range(steps), (batch for epoch in epochs for batch in epoch), strict=False):
        yield batch


def ours(
    build: Callable[[], nn.Module] = perceptron, micro_batch_size: int = 20, steps: int = STEPS, **options: Any
) -> Curve:
    engine = tiny_engine(TinyWorkload(build), **options)
    losses, norms = [], []
    for indices in global_batches(steps):
        window = [ROWS.micro(*piece.tolist()) for piece in Slice(0, 1, micro_batch_size).pieces(indices.numpy())]
        losses.append(engine.forward_backward(window).item())
        norms.append(engine.optimizer_step(1.0).grad_norm.item())
    return Curve(losses, norms, engine.weights())


def torch_optimizer(model: nn.Module, config: Optimizer, scaled: bool) -> torch.optim.Optimizer:
    """Of fused kernels, as ours: others round otherwise on some CPUs, by 1e-6 after these steps. Not with a GradScaler,
    whose skipped steps torch's fused SGD does not skip on CPUs."""
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=not scaled)
    return torch.optim.AdamW(groups, lr=config.lr, fused=not scaled)


def plain(precision: str, optimizer: Optimizer, max_grad_norm: float | None, init_scale: float = 65536.0) -> Curve:
    """One process, whole batches, torch's own autocast, GradScaler and clipping."""
    model = perceptron().to(DEVICE)
    updates = torch_optimizer(model, optimizer, scaled=precision == "fp16-mixed")
    compute = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=init_scale, enabled=precision == "fp16-mixed")
    losses, norms = [], []
    for indices in global_batches():
        batch = on(DEVICE, ROWS.batch(*indices.tolist()))
        with torch.autocast(DEVICE, dtype=compute) if compute else contextlib.nullcontext():
            loss = F.cross_entropy(model(batch["features"]).float(), batch["labels"], ignore_index=IGNORED)
        scaler.scale(loss).backward()
        scaler.unscale_(updates)
        bound = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), bound).item())
        scaler.step(updates)
        scaler.update()
        updates.zero_grad()
        losses.append(loss.item())
    return Curve(losses, norms, model.state_dict())


def assert_same(one: Curve, other: Curve, tolerance: float) -> None:
    assert one.losses == pytest.approx(other.losses, rel=tolerance)
    assert one.norms == pytest.approx(other.norms, rel=tolerance, nan_ok=True)
    for name, weight in other.weights.items():
        torch.testing.assert_close(one.weights[name], weight, rtol=tolerance, atol=tolerance)


# --- the same curve as plain PyTorch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_fp32_matches_plain_pytorch(optimizer: Optimizer, max_grad_norm: float | None) -> None:
    expected = plain("fp32", optimizer, max_grad_norm)
    assert_same(ours(optimizer=optimizer, max_grad_norm=max_grad_norm), expected, 1e-6)
    assert min(expected.norms) > 0.5 / 4
    assert sum(norm > 0.5 for norm in expected.norms) > 3, "clipping is active"


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precisions_are_torchs_autocast_and_scaler_to_the_bit(precision: str, optimizer: Optimizer) -> None:
    with fp32_products(True):
        expected = plain(precision, optimizer, 0.5)
        found = ours(precision=precision, optimizer=optimizer, max_grad_norm=0.5)
    # the mean is a sum divided by the count here: its last bit may differ, and nothing else
    assert_same(found, expected, 1e-5)
    fp32 = plain("fp32", optimizer, 0.5)
    assert found.losses != pytest.approx(fp32.losses, rel=1e-5), "products really are rounded"
    assert found.losses == pytest.approx(fp32.losses, rel=0.05)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_overflowing_first_steps_leave_the_curve_of_the_plain_loop(optimizer: Optimizer) -> None:
    scale = 2.0**26
    with fp32_products(True):
        expected = plain("fp16-mixed", optimizer, 0.5, init_scale=scale)
        found = ours(precision="fp16-mixed", optimizer=optimizer, max_grad_norm=0.5, scaler=Scaler(init_scale=scale))
    assert expected.losses[0] != expected.losses[-1]
    assert not all(map(torch.isfinite, map(torch.tensor, expected.norms))), "the first steps overflow"
    assert_same(found, expected, 1e-5)


# --- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [1, 7, 13])
def test_cutting_the_batch_changes_nothing(micro_batch_size: int) -> None:
    """7 cuts 20 samples into 7, 7 and 6, and each epoch's last 10 into 5 and 5; valid targets are uneven."""
    whole = ours(optimizer=SGD, max_grad_norm=0.5)
    cut = ours(optimizer=SGD, max_grad_norm=0.5, micro_batch_size=micro_batch_size)
    assert_same(cut, whole, 2e-6)


def test_a_window_without_valid_targets_has_loss_zero_and_moves_nothing() -> None:
    engine = tiny_engine(TinyWorkload(perceptron))
    batch = ROWS.batch(0, 1)
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    before = {name: weight.clone() for name, weight in engine.weights().items()}
    assert engine.forward_backward([MicroBatch(batch)]).item() == 0
    assert engine.optimizer_step(1.0).grad_norm.item() == 0
    assert all(torch.equal(weight, before[name]) for name, weight in engine.weights().items())


def test_the_schedules_factor_scales_the_peak_rate_of_every_step() -> None:
    engine = tiny_engine(TinyWorkload(perceptron), optimizer=Optimizer(name="sgd", lr=0.5))
    for factor in (0.1, 1.0, 0.2):
        before = {name: weight.clone() for name, weight in engine.weights().items()}
        engine.forward_backward([ROWS.micro(*range(20))])
        gradients = {name: p.grad.clone() for name, p in engine._model.named_parameters() if p.grad is not None}
        engine.optimizer_step(factor)
        for name, weight in engine.weights().items():
            torch.testing.assert_close(weight, before[name] - 0.5 * factor * gradients[name])


# --- loss scaling ----------------------------------------------------------------------------------------------------


def fp16_engine(init_scale: float, **options: Any) -> SingleEngine:
    return tiny_engine(TinyWorkload(perceptron), "fp16-mixed", scaler=Scaler(init_scale=init_scale), **options)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_an_overflow_skips_the_step_and_halves_the_scale(optimizer: Optimizer) -> None:
    scale = 2.0**30
    engine = fp16_engine(scale, optimizer=optimizer)
    before = {name: weight.clone() for name, weight in engine.weights().items()}
    window = [ROWS.micro(*range(20))]
    with fp32_products(True):
        assert 0 < engine.forward_backward(window).item() < 10, "the loss that is told is not scaled"
        overflowed = engine.optimizer_step(1.0)
        assert overflowed.skipped
        assert overflowed.scale == scale
        assert not torch.isfinite(overflowed.grad_norm)
        assert all(torch.equal(weight, before[name]) for name, weight in engine.weights().items())
        assert all(p.grad is None for p in engine._model.parameters()), "the overflowed gradients are gone"

        engine.forward_backward(window)
        assert engine.optimizer_step(1.0).scale == scale / 2


def test_a_good_step_is_no_skipped_one_even_when_the_scale_grows() -> None:
    settings = Scaler(init_scale=8.0, growth_interval=2, growth_factor=4.0)
    engine = tiny_engine(TinyWorkload(perceptron), "fp16-mixed", scaler=settings)
    scales = []
    with fp32_products(True):
        for _ in range(4):
            engine.forward_backward([ROWS.micro(*range(20))])
            result = engine.optimizer_step(1.0)
            assert not result.skipped
            scales.append(result.scale)
    assert scales == [8.0, 8.0, 32.0, 32.0]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16", "fp16"])
def test_other_precisions_do_not_scale(precision: str) -> None:
    engine = tiny_engine(TinyWorkload(perceptron), precision)
    with fp32_products(True):
        engine.forward_backward([ROWS.micro(*range(20))])
    result = engine.optimizer_step(1.0)
    assert result.scale is None
    assert not result.skipped


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    """Else the norm would be 1,024 times too large, and the step clipped to almost nothing."""
    results = []
    for scale in (1.0, 1024.0):
        engine = fp16_engine(scale, max_grad_norm=0.1)
        with fp32_products(True):
            engine.forward_backward([ROWS.micro(*range(20))])
            norm = engine.optimizer_step(1.0).grad_norm.item()
        results.append((norm, engine.weights()["0.weight"]))
    (norm, weight), (scaled_norm, scaled_weight) = results
    assert norm > 0.1, "clipping is active"
    assert scaled_norm == pytest.approx(norm, rel=2e-3)
    moved = (weight - perceptron().to(DEVICE).state_dict()["0.weight"]).norm()
    assert (scaled_weight - weight).norm() < 0.01 * moved


# --- dtypes ----------------------------------------------------------------------------------------------------------


class FullPrecisionIsland(nn.Module):
    """A product in autocast, then one that opts out of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inside, self.island = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.inside(features)
        with torch.autocast(DEVICE, enabled=False):
            logits: Tensor = self.island(hidden.float())
        self.seen += [hidden.dtype, logits.dtype]
        self.exact = F.linear(hidden.float(), self.island.weight, self.island.bias)
        self.logits = logits
        return logits


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_an_island_outside_autocast_stays_fp32(precision: str) -> None:
    model = FullPrecisionIsland()
    engine = tiny_engine(TinyWorkload(lambda: model), precision)
    with fp32_products(True):
        engine.forward_backward([ROWS.micro(*range(20))])
    assert model.seen == [getattr(torch, PRECISIONS[precision].compute), torch.float32]
    with torch.autocast(DEVICE, enabled=False):
        outside = F.linear(ROWS.batch(*range(20))["features"].to(DEVICE), model.inside.weight, model.inside.bias)
    assert not torch.equal(outside, F.linear(outside.bfloat16().float(), torch.eye(FEATURES, device=DEVICE)))
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
# in fp16 the squares of small gradients are 0, and eps alone bounds the update
@pytest.mark.parametrize("optimizer", [SGD, Optimizer(lr=0.01, eps=1e-2)], ids=["sgd", "adamw"])
def test_a_pure_precision_keeps_everything_in_its_dtype_and_learns(
    precision: str, dtype: torch.dtype, optimizer: Optimizer
) -> None:
    engine = tiny_engine(TinyWorkload(perceptron), precision, optimizer)
    with fp32_products(True):
        first = engine.forward_backward([ROWS.micro(*range(90))])
        assert {p.grad.dtype for p in engine._model.parameters() if p.grad is not None} == {dtype}
        for _ in range(STEPS):
            engine.optimizer_step(1.0)
            last = engine.forward_backward([ROWS.micro(*range(90))])
    assert first.dtype == last.dtype == torch.float32
    assert last < 0.7 * first
    assert {p.dtype for p in engine._model.parameters()} == {dtype}
    assert {t.dtype for t in engine.tensors() if t.numel() > 1} == {dtype}
    assert engine.engaged().parameter_dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(("precision", "kept"), [("fp32", "float32"), ("bf16", "bfloat16"), ("bf16-mixed", "float32")])
def test_floating_inputs_take_the_parameters_dtype_and_others_keep_theirs(precision: str, kept: str) -> None:
    seen: dict[str, torch.dtype] = {}

    class Watching(TinyWorkload):
        def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
            seen.update({name: tensor.dtype for name, tensor in batch.items()})
            return super().loss_sum(model, batch)

    with fp32_products(True):
        tiny_engine(Watching(perceptron), precision).forward_backward([ROWS.micro(0, 1, 2)])
    assert seen == {"features": getattr(torch, kept), "labels": torch.int64}


class BareVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES, 3))

    def forward(self, features: Tensor) -> Tensor:
        return 1e4 * features @ self.weight


def test_the_norm_of_fp16_gradients_does_not_overflow() -> None:
    """Squares of fp16 numbers overflow from 256 on; the gradients here are about 2,000."""
    engine = tiny_engine(TinyWorkload(BareVector), "fp16", max_grad_norm=1.0)
    with fp32_products(True):
        engine.forward_backward([ROWS.micro(*range(20))])
        (gradient,) = (p.grad.double().clone() for p in engine._model.parameters() if p.grad is not None)
        norm = engine.optimizer_step(1.0).grad_norm
    assert gradient.abs().max() > 256
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(gradient.norm().item(), rel=1e-4)
    moved = engine.weights()["weight"].double().norm()
    assert moved.item() == pytest.approx(0.1, rel=0.01), "clipped to 1, times the rate"


# --- evaluation and prediction ---------------------------------------------------------------------------------------


def with_dropout() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(FEATURES, 16),
        *(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.5)) for _ in range(3)),
        nn.Linear(16, 3),
    )


def test_evaluation_over_ragged_batches_is_the_computation_over_all_samples_at_once() -> None:
    workload = TinyWorkload(with_dropout, evaluation=Rows(23, seed=5, ignored_share=0.3))
    engine = tiny_engine(workload)
    rows = workload.evaluation
    assert rows is not None
    cuts = [range(10), range(10, 11), range(11, 20), range(20, 23)]
    found = engine.evaluate([rows.micro(*cut) for cut in cuts], workload.metrics())
    with torch.no_grad():
        logits = with_dropout().eval().to(DEVICE)(rows.features.to(DEVICE)).cpu()
    valid = rows.labels != IGNORED
    assert found["loss"] == pytest.approx(F.cross_entropy(logits[valid], rows.labels[valid]).item(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == rows.labels)[valid].double().mean().item())


def test_metrics_start_anew_at_each_evaluation() -> None:
    workload = TinyWorkload(perceptron)
    engine, metrics = tiny_engine(workload), workload.metrics()
    first = engine.evaluate([ROWS.micro(*range(30))], metrics)
    engine.evaluate([ROWS.micro(*range(30, 90))], metrics)
    assert engine.evaluate([ROWS.micro(*range(30))], metrics) == first


def test_training_drops_out_again_after_an_evaluation() -> None:
    workload = TinyWorkload(with_dropout)
    engine = tiny_engine(workload)
    engine.evaluate([ROWS.micro(0, 1)], workload.metrics())
    losses = {engine.forward_backward([ROWS.micro(*range(20))]).item() for _ in range(3)}
    assert len(losses) == 3


def test_evaluation_leaves_no_graph_and_no_gradients() -> None:
    engine = tiny_engine(TinyWorkload(perceptron))
    engine.evaluate([ROWS.micro(0, 1)], {})
    assert all(p.grad is None for p in engine._model.parameters())


def test_predictions_come_in_order_without_dropout() -> None:
    engine = tiny_engine(TinyWorkload(with_dropout))
    rows = list(engine.predict([ROWS.micro(*range(50)), ROWS.micro(*range(50, 90))]))
    with torch.no_grad():
        expected = with_dropout().eval().to(DEVICE)(ROWS.features.to(DEVICE)).argmax(1).tolist()
    assert [row["label"] for row in rows] == expected
    assert len(set(expected)) > 1


# --- recompute and compile -------------------------------------------------------------------------------------------


def gradients_and_saved(recompute: bool) -> tuple[dict[str, Tensor], int]:
    engine = tiny_engine(TinyWorkload(with_dropout), recompute=recompute)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    torch.manual_seed(11)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward_backward([ROWS.micro(*range(20))])
    return {name: p.grad for name, p in engine._model.named_parameters() if p.grad is not None}, sum(saved)


def test_recompute_gives_the_same_gradients_to_the_bit_dropout_included_and_saves_less() -> None:
    kept, saved = gradients_and_saved(recompute=False)
    recomputed, saved_with_recompute = gradients_and_saved(recompute=True)
    assert recomputed.keys() == kept.keys()
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)
    assert saved_with_recompute < saved / 2


@pytest.mark.slow
def test_a_compiled_model_trains_on_the_same_curve() -> None:
    expected = ours(optimizer=SGD, max_grad_norm=0.5, steps=6)
    found = ours(optimizer=SGD, max_grad_norm=0.5, steps=6, compile=True, micro_batch_size=10)
    assert_same(found, expected, 1e-5)


# --- state -----------------------------------------------------------------------------------------------------------


def train(engine: SingleEngine, batches: Sequence[Tensor]) -> list[float]:
    losses = []
    for indices in batches:
        losses.append(engine.forward_backward([ROWS.micro(*indices.tolist())]).item())
        engine.optimizer_step(1.0)
    return losses


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16"])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_an_engine_given_anothers_state_goes_on_to_the_same_bits(precision: str, optimizer: Optimizer) -> None:
    options: dict[str, Any] = {"scaler": Scaler(init_scale=2.0**24, growth_interval=3)}
    batches = list(global_batches(10))
    with fp32_products(True):
        first = tiny_engine(TinyWorkload(perceptron), precision, optimizer, **options)
        train(first, batches[:5])
        state = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, first.state_dict())
        second = tiny_engine(TinyWorkload(perceptron), precision, optimizer, **options)
        second.load_state_dict(state)
        assert train(second, batches[5:]) == train(first, batches[5:])
    assert all(torch.equal(weight, first.weights()[name]) for name, weight in second.weights().items())
    assert second.state_dict()["engine"] == first.state_dict()["engine"]


def test_weights_alone_are_enough_to_evaluate() -> None:
    trained = tiny_engine(TinyWorkload(perceptron), optimizer=SGD)
    train(trained, list(global_batches(5)))
    workload = TinyWorkload(perceptron)
    fresh = tiny_engine(workload)
    before = fresh.evaluate([ROWS.micro(*range(90))], {})
    fresh.load_weights(trained.weights())
    after = fresh.evaluate([ROWS.micro(*range(90))], {})
    assert after == trained.evaluate([ROWS.micro(*range(90))], {})
    assert after != before


def test_names_of_weights_are_the_models_own_whatever_wraps_it() -> None:
    names = set(perceptron().state_dict())
    assert set(tiny_engine(TinyWorkload(perceptron)).weights()) == names
    assert set(tiny_engine(TinyWorkload(perceptron), compile=True).weights()) == names
    assert set(tiny_engine(TinyWorkload(with_dropout), recompute=True).weights()) == set(with_dropout().state_dict())


def test_engaged_tells_what_the_model_holds() -> None:
    def partly_frozen() -> nn.Module:
        model = perceptron()
        model[0].requires_grad_(False)
        return model

    engaged = tiny_engine(TinyWorkload(partly_frozen)).engaged()
    total = sum(p.numel() for p in perceptron().parameters())
    assert engaged.global_parameters == engaged.local_parameters == total
    assert engaged.trained_parameters == total - FEATURES * 16 - 16
    assert engaged.world_size == 1
    assert engaged.wrapper == "Sequential"


def test_tensors_are_all_that_is_held_between_steps() -> None:
    engine = tiny_engine(TinyWorkload(perceptron), optimizer=ADAMW)
    parameters = sum(p.numel() for p in perceptron().parameters())
    assert sum(t.numel() for t in engine.tensors()) == parameters
    train(engine, list(global_batches(1)))
    steps = len(list(perceptron().parameters()))
    assert sum(t.numel() for t in engine.tensors()) == 3 * parameters + steps


def test_assets_are_the_workloads(tmp_path: Path) -> None:
    tiny_engine(TinyWorkload(perceptron)).save_assets(tmp_path, {})
    assert (tmp_path / "assets.txt").read_text() == "Sequential"
