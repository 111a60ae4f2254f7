"""Replicas on a CPU's threads mean what nn.DataParallel's mean on GPUs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from drivetrain.engines import replicas
from drivetrain.engines.replicas import ThreadReplicas, gather, scatter
from drivetrain.measure.flops import FlopCount
from drivetrain.measure.memory import TensorPeak


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_outputs_and_gradients_are_those_of_the_whole_batch(samples: int, count: int) -> None:
    inputs = torch.randn(samples, 5)
    plain, spread = network(), network()
    wrapped = ThreadReplicas(spread, count)
    expected, found = plain(inputs), wrapped(inputs)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for one, other in zip(plain.parameters(), spread.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


class Watching(nn.Module):
    """Remembers the batch of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[int] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor | None]:
        self.seen.append(len(x))
        return {"y": x * self.weight, "scale": scale}


def test_each_replica_gets_a_chunk_and_keywords_are_cut_too() -> None:
    module = Watching()
    found = ThreadReplicas(module, 3)(torch.arange(7.0), scale=torch.arange(7.0))
    assert sorted(module.seen) == [1, 3, 3]  # as torch.chunk cuts
    assert torch.equal(found["scale"], torch.arange(7.0))


def test_batch_norm_counts_each_chunk_alone_and_keeps_the_first_ones_statistics() -> None:
    inputs = torch.randn(8, 4)
    spread, first = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    found = ThreadReplicas(spread, 2)(inputs)
    halves = [nn.BatchNorm1d(4)(half) for half in inputs.chunk(2)]
    torch.testing.assert_close(found, torch.cat(halves))
    first(inputs[:4])
    torch.testing.assert_close(spread.running_mean, first.running_mean)


def test_autocast_reaches_the_threads() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ThreadReplicas(network(), 2)(torch.randn(4, 5)).dtype == torch.bfloat16
    with torch.no_grad():
        assert not ThreadReplicas(network(), 2)(torch.randn(4, 5)).requires_grad


def test_what_counts_memory_and_flops_sees_the_threads() -> None:
    model, inputs = nn.Linear(300, 200), torch.randn(100, 300)

    def counted(module: nn.Module) -> tuple[int, int]:
        with TensorPeak() as peak, FlopCount() as flops:
            module(inputs).sum().backward()
        return peak.peak_bytes, flops.total

    (alone, of_one), (spread, of_two) = counted(model), counted(ThreadReplicas(model, 2))
    assert of_two == of_one == 2 * (2 * 100 * 300 * 200), "forward, and the gradient of the weight"
    assert spread >= 3 * 4 * 300 * 200 > alone, "each replica has weights of its own"


def test_inference_makes_replicas_once_and_training_every_time() -> None:
    wrapped = ThreadReplicas(network(), 2)
    with mock.patch.object(replicas, "replicate", wraps=replicas.replicate) as made:
        with torch.no_grad():
            for _ in range(3):
                before = wrapped(torch.ones(4, 5))
        assert made.call_count == 1
        for _ in range(2):
            wrapped(torch.ones(4, 5))
        assert made.call_count == 3
        with torch.no_grad():
            wrapped.module[0].weight.zero_()  # type: ignore[union-attr, operator]
            wrapped.forget()
            assert not torch.equal(wrapped(torch.ones(4, 5)), before)
        assert made.call_count == 4


def test_tied_weights_sum_their_gradients_once_each() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4, bias=False)
            self.two = nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    torch.manual_seed(1)
    model, inputs = Tied(), torch.randn(6, 4)
    (expected,) = torch.autograd.grad(model(inputs).square().sum(), model.one.weight)
    (found,) = torch.autograd.grad(ThreadReplicas(model, 3)(inputs).square().sum(), model.one.weight)
    torch.testing.assert_close(found, expected)


def test_a_transformers_model_keeps_its_kind_of_output() -> None:
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=3
    )
    model = BertForSequenceClassification(config).eval()
    ids = torch.randint(1, 20, (5, 6))
    found = ThreadReplicas(model, 2)(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert type(found) is type(model(input_ids=ids))
    torch.testing.assert_close(found.logits, model(input_ids=ids).logits)


def test_gathering_undoes_scattering() -> None:
    nest = {"a": torch.arange(5), "b": [torch.arange(10.0).view(5, 2), "same"], "c": None}
    pieces = scatter(nest, 2)
    assert len(pieces) == 2
    whole = gather(pieces)
    assert torch.equal(whole["a"], nest["a"])
    assert torch.equal(whole["b"][0], nest["b"][0])  # type: ignore[index]
    assert whole["b"][1] == "same"
    assert whole["c"] is None
