"""Products in 8 bits, emulated on a CPU, against torchao.float8 on plain PyTorch: the layers, and steps on engines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from drivetrain.config.engines import DRIVER, SingleEngine
from drivetrain.errors import UserError
from drivetrain.models import fp8
from drivetrain.models.fp8 import compute_in_fp8, description
from drivetrain.numerics.emulation import fp32_products
from drivetrain.runtime.library_messages import hush
from tests.ranks import RankPool
from tests.tiny_workload import FEATURES, IGNORED, Rows, TinyWorkload, tiny_engine

pytest.importorskip("torchao")
STEPS, BATCH, LR = 4, 12, 0.1


def network() -> nn.Module:
    """Its first and last layers have sides that are no multiples of 16."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(2)]
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Sequential(*blocks), nn.Linear(32, 3))


def plainly(model: nn.Module) -> nn.Module:
    hush()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, _: str) -> bool:
        return isinstance(module, nn.Linear) and not (module.in_features % 16 or module.out_features % 16)

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=fits)
    return model


def test_outputs_and_gradients_are_torchaos() -> None:
    ours, theirs, whole = compute_in_fp8(network(), emulate=True), plainly(network()), network()
    x = torch.randn(BATCH, FEATURES)
    outputs = [model(x) for model in (ours, theirs, whole)]
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(outputs[0], outputs[1])
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, other.grad), name  # type: ignore[arg-type]
    far = (outputs[0] - outputs[2]).abs().max() / outputs[2].abs().max()
    assert 1e-3 < far < 0.1, "products are rounded to 8 bits, and to no fewer"


def test_layers_whose_sides_do_not_fit_and_the_head_stay_and_the_run_says_how_many() -> None:
    model = compute_in_fp8(network(), emulate=True)
    assert description(model) == "4 of 6 in fp8; 2 have sides that are no multiples of 16"
    assert type(model[0]) is nn.Linear
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = compute_in_fp8(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=48, **sizes)), emulate=True)
    assert type(llama.lm_head) is nn.Linear
    assert description(llama) == "7 of 8 in fp8"


def test_parameters_stay_the_same_ones() -> None:
    model = network()
    model[1].requires_grad_(False)
    before = dict(model.named_parameters())
    after = dict(compute_in_fp8(model, emulate=True).named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in after)
    with torch.device("meta"):
        empty = network()
    assert all(p.is_meta for p in compute_in_fp8(empty).parameters())


def test_a_model_without_such_layers_and_a_missing_torchao_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"precision: Sequential has no linear layers beside its head with sides"):
        compute_in_fp8(nn.Sequential(nn.Linear(16, 15)))
    fp8.check_installed()
    monkeypatch.setattr(fp8, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"fp8 needs torchao[\s\S]*pip install 'drivetrain\[lowbit\]'"):
        fp8.check_installed()


# --- on engines ------------------------------------------------------------------------------------------------------

ENGINES = {"ddp": {"name": "ddp"}, "fsdp": {"name": "fsdp"}, "fsdp meta": {"name": "fsdp", "meta": True}}
Curve = tuple[list[float], list[float], dict[str, Tensor], Any]


def steps_on(config: Any, rank: int = 0, world: int = 1) -> Curve:
    """Losses, gradient norms, the weights at the end and what the run says, of this rank's part of each batch."""
    work = TinyWorkload(network, Rows(STEPS * BATCH, ignored_share=0.15))
    engine = tiny_engine(work, "fp8-mixed", config=config, max_grad_norm=1.0, devices=world)
    losses, norms = [], []
    for indices in batches():
        loss = engine.forward_backward([work.train.micro(*indices.chunk(world)[rank].tolist())])
        losses.append(engine.summed(loss).item())
        norms.append(engine.optimizer_step(1.0).grad_norm.item())
    weights = {name: weight.clone() for name, weight in engine.weights().items()}
    says = engine.engaged().linear_layers
    engine.close()
    return losses, norms, weights, says


def batches() -> Sequence[Tensor]:
    return torch.arange(STEPS * BATCH).split(BATCH)


def emulated() -> None:
    """Returns what a CPU's kernels cannot, in this process."""
    fp8.compute_in_fp8 = functools.partial(compute_in_fp8, emulate=True)


def on_a_rank(world: int, rank: int | None = None) -> dict[str, Curve]:
    rank = torch.distributed.get_rank() if rank is None else rank
    emulated()
    try:
        with fp32_products(True):
            return {name: steps_on(DRIVER.validate_python(block), rank, world) for name, block in ENGINES.items()}
    finally:
        fp8.compute_in_fp8 = compute_in_fp8


def plain_steps(world: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Each batch in as many pieces as ranks share it: a piece has scales of its own."""
    model, rows = plainly(network()), Rows(STEPS * BATCH, ignored_share=0.15)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    with fp32_products(True):
        for indices in batches():
            count, total = int((rows.labels[indices] != IGNORED).sum()), 0.0
            for piece in indices.chunk(world):
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(rows.features[piece]).float()
                loss = F.cross_entropy(logits, rows.labels[piece], reduction="sum", ignore_index=IGNORED) / count
                loss.backward()
                total += loss.item()
            losses.append(total)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, model.state_dict()


def check(found: Curve, world: int) -> None:
    losses, norms, weights, says = found
    expected, their_norms, their_weights = plain_steps(world)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert norms == pytest.approx(their_norms, rel=1e-5)
    for name, weight in their_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-4)  # a sum's last bit rounds to fp8
    assert says == "4 of 6 in fp8; 2 have sides that are no multiples of 16"


def test_one_process_trains_as_plain_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "compute_in_fp8", functools.partial(compute_in_fp8, emulate=True))
    with fp32_products(True):
        check(steps_on(SingleEngine()), 1)


def test_ranks_train_as_plain_torchao_with_the_batch_cut_alike(ranks: Callable[[int], RankPool]) -> None:
    first, *_ = ranks(2).run(on_a_rank, 2)
    assert first.keys() == ENGINES.keys()
    for found in first.values():
        check(found, 2)
