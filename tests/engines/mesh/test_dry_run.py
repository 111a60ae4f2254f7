"""The trial step at set-up: a spread model that gives a parameter another gradient than the whole one is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from drivetrain.config.workload import LanguageModel
from drivetrain.data.loader import MicroBatch
from drivetrain.engines.auxiliary import Companion
from drivetrain.engines.gradient_sum import GradientSum
from drivetrain.engines.mesh.dry_run import Trial, aside
from drivetrain.errors import UserError
from drivetrain.workloads.base import Layout, Workload
from drivetrain.workloads.loss_contract import Auxiliary, LossContext, Statistics
from tests.parity.mesh_cases import LENGTH, LLAMA, Columns, Declared, MeshCase, Pair, Seeded, engine_of, text
from tests.ranks import RankPool
from tests.tiny_workload import FEATURES, Rows, TinyWorkload


class Mixing(Pair):
    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(0.5 * hidden) + 0.5 * first


class MixingBack(Pair):
    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) + first - first.detach()


class Skipping(Columns):
    """Each block also reads what came before all of them."""

    def __init__(self, block: type[Pair] = Mixing) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block(12, nn.GELU()) for _ in range(4))

    def forward(self, features: Tensor) -> Tensor:
        first = hidden = self.inner(features)
        for layer in self.layers:
            hidden = layer(hidden, first)
        return self.head(hidden)


class SkippingBack(Skipping):
    """Each block also sends a gradient there, and no more."""

    def __init__(self) -> None:
        super().__init__(MixingBack)


class FromZero(Skipping):
    """Starts with a head of zeros, behind which there is no gradient, and so none to be wrong."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


class Experts(nn.Module):
    """Each sample is one expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(12), nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        chosen, out = (hidden[:, 0] > 0).long(), hidden.clone()
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out[mine] = hidden[mine] + expert(self.norm(hidden[mine]))
        return out


class Mixture(Columns):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(4))


class Reused(Columns):
    """Its head is its first layer too: one weight, of which the plan splits one place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, 12), nn.Linear(FEATURES, 12)
        self.head.weight, self.last = self.inner.weight, nn.Linear(12, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.inner(features)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden + self.head(features))


class OddHeads(nn.Module):
    """A Transformers encoder of three heads in a user's module."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
        self.encoder = ViTForImageClassification(ViTConfig(image_size=FEATURES, patch_size=4, num_labels=3, **sizes))

    def forward(self, features: Tensor) -> Tensor:
        pictures = features[:, None, None].expand(-1, 3, FEATURES, -1)
        return self.encoder(pictures).logits  # type: ignore[no-any-return]


class OwnAttention(nn.Module):
    """Three heads over the features of a sample, cut into positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 36), nn.Linear(12, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.qkv(hidden.view(len(hidden), 2, 6)).view(len(hidden), 2, 3, 3, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return hidden + self.out(mixed.transpose(1, 2).flatten(2)).flatten(1)


class OwnHeads(Columns):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnAttention() for _ in range(4))


class HeadsDeclared(Declared):
    @property
    def layout(self) -> Layout:
        return Layout(tensor_parallel={"layers.*.qkv": "colwise", "layers.*.out": "rowwise"})


def seeded(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(5)
        return kind()

    return build


class HeadSplit(Declared):
    @property
    def layout(self) -> Layout:
        return Layout(tensor_parallel={"head": "colwise_gather_output"})


def language(attention: str = "auto", **config: Any) -> Workload:
    block = {"type": "language_model", "model": {"config": config, "attention": attention}}
    data = {"train": str(text()), "length": LENGTH, "evaluation_fraction": 0.1}
    return Seeded(LanguageModel.model_validate({**block, "data": data}), seed=0)


OPT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
LFM2 = {**LLAMA, "model_type": "lfm2", "block_ff_dim": 48, "layer_types": ["conv", "full_attention"] * 2}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 8}
CHUNKED = {  # into pieces that no sequence of the trial fills
    **LLAMA, "model_type": "llama4_text", "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 64,
    "pad_token_id": 0,
}  # fmt: skip
GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 4}


@contextmanager
def replicas_not_summed() -> Iterator[None]:
    with mock.patch.object(GradientSum, "finish"), mock.patch.object(GradientSum, "_arrived", return_value=None):
        yield


@dataclass(frozen=True)
class Attempt:
    degrees: Mapping[str, Any] = field(hash=False)
    says: str
    kind: type[nn.Module] | None = None
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    precision: str = "fp32"
    workload: type[TinyWorkload] = Declared
    within: Callable[[], Any] = nullcontext
    compile: bool = False


ATTEMPTS = {
    "reads past the blocks": Attempt({"pp": 2}, "engine.pp: the loss of the model spread over pp=2", Skipping),
    "in mixed precision": Attempt({"pp": 2}, "engine.pp: the loss", Skipping, precision="bf16-mixed"),
    "behind a head of zeros": Attempt({"pp": 2}, "engine.pp: the loss", FromZero),
    "sends gradients past them": Attempt({"pp": 2}, "engine.pp: over pp=2, the gradient of inner", SkippingBack),
    "replicas not summed": Attempt(
        {"dp": 2}, "engine.dp: over dp=2, the gradient of inner", Columns, within=replicas_not_summed
    ),
    "experts": Attempt({"dp": 2, "shard": True}, "get a gradient from some samples only", Mixture),
    "a tie split in one place": Attempt(
        {"tp": 2}, "engine.tp: inner and head are one weight (tied embeddings)", Reused, workload=HeadSplit
    ),
    "heads in a user's module": Attempt({"tp": 2}, "num_attention_heads (3) is no", OddHeads, workload=TinyWorkload),
    "derived and compiled": Attempt({"tp": 2}, "compile: the plan of", OddHeads, workload=TinyWorkload, compile=True),
    "no heads of its own": Attempt({"tp": 2}, "engine.tp: the loss of the model spread over tp=2", config=OPT),
    "no attention": Attempt({"cp": 2}, "engine.cp: of 2 blocks 0 call attention", config=MAMBA),
    "no attention, mixed": Attempt({"cp": 2}, "of 2 blocks 0 call", config=MAMBA, precision="bf16-mixed"),
    "convolutions between": Attempt({"cp": 2}, "engine.cp: of 4 blocks 2 call attention", config=LFM2),
    "attention in chunks": Attempt({"cp": 2}, "engine.cp: some layers are chunked_attention", config=CHUNKED),
    "experts split apart": Attempt({"tp": 2}, "experts.gate_up_proj as packed_colwise", config=MIXTRAL),
    "attention sinks": Attempt({"cp": 2}, "GptOssAttention asks for s_aux", config=GPT_OSS),
    "a window in a mask over parts": Attempt(
        {"tp": 2, "sequence_parallel": True},
        "leave sequence_parallel out, or leave tp out",
        config={**MISTRAL, "attention": "sdpa"},
    ),
    "a window that attention keeps": Attempt({"tp": 2, "sequence_parallel": True}, "engaged", config=MISTRAL),
    "heads of a user's own": Attempt({"tp": 2}, "engine.tp: ", OwnHeads, workload=HeadsDeclared),
    "a cap on scores": Attempt({"cp": 2}, "Gemma2Attention asks for softcap", config=GEMMA2),
    "layers left out": Attempt({"cp": 2}, "engine.cp: layerdrop is 0.5", config={**OPT, "layerdrop": 0.5}),
    "no sequences": Attempt({"tp": 2, "sequence_parallel": True}, "are no sequences that can be cut", Columns),
}


def refusals(attempts: Mapping[str, Attempt]) -> dict[str, str]:
    """Returns what set-up says to each."""
    words: dict[str, str] = {}
    for name, attempt in attempts.items():
        work = language(**attempt.config)
        if attempt.kind is not None:
            work = attempt.workload(seeded(attempt.kind), Rows(62), Rows(10))
        try:
            with attempt.within():
                engine_of(MeshCase(dict(attempt.degrees), attempt.precision, compile=attempt.compile), work)
            words[name] = "engaged"
        except UserError as error:
            words[name] = str(error)
    return words


@pytest.fixture(scope="module")
def words(ranks: Callable[[int], RankPool]) -> list[dict[str, str]]:
    return ranks(2).run(refusals, ATTEMPTS)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_a_mesh_would_compute_in_another_way_is_refused_on_all_ranks(
    name: str, words: list[dict[str, str]]
) -> None:
    for of_rank in words:
        assert ATTEMPTS[name].says in of_rank[name]


class Counting(Columns):
    """Draws, counts its calls in a buffer, and has a head of zeros."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(features + 0 * torch.rand(()))


def traces(degrees: Mapping[str, Any]) -> list[str]:
    """Returns what set-up left behind of its trial."""
    built = seeded(Counting)()
    state = torch.get_rng_state()
    engine: Any = engine_of(MeshCase(dict(degrees)), Declared(seeded(Counting), Rows(62), Rows(10)))
    pipeline, weights = engine._pipeline, engine.weights()
    return [
        *(["generator"] if not torch.equal(state, torch.get_rng_state()) else []),
        *(f"gradient of {name}" for name, p in engine._model.named_parameters() if p.grad is not None),
        *(name for name, tensor in weights.items() if not torch.equal(tensor, built.state_dict()[name])),
        *(["measurements"] if pipeline and (pipeline.waiting_share is not None or pipeline.most_pieces) else []),
        *(["schedule"] if pipeline and pipeline._made else []),
        *(["options"] if engine._options.precision.name != "fp32" or engine._tries else []),
    ]


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"dp": 2, "shard": True}], ids=str)
def test_a_trial_leaves_nothing_behind(ranks: Callable[[int], RankPool], degrees: dict[str, Any]) -> None:
    assert ranks(2).run(traces, degrees) == [[], []]


def evaluated_only(degrees: Mapping[str, Any]) -> tuple[float, bool]:
    """The loss of an engine that was set up without an optimizer, and whether it has a gradient."""
    work = Declared(seeded(Columns), Rows(62), Rows(10))
    engine: Any = engine_of(MeshCase(dict(degrees)), work, trains=False)
    found = engine.evaluate([Rows(10).micro(*range(10))], work.metrics())["loss"]
    return found, any(parameter.grad is not None for parameter in engine._model.parameters())


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}], ids=str)
def test_what_is_only_evaluated_is_tried_without_gradients(
    ranks: Callable[[int], RankPool], degrees: dict[str, Any]
) -> None:
    expected = evaluated_only({"name": "single"})[0]
    assert ranks(2).run(evaluated_only, degrees) == [(pytest.approx(expected), False)] * 2


def test_what_is_tried_aside_leaves_buffers_and_generators_as_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    before, state = {name: buffer.clone() for name, buffer in model.named_buffers()}, torch.get_rng_state()
    with aside(model):
        assert not model[1].training, "nothing is dropped"
        for buffer in model.buffers():
            buffer.add_(1)
        torch.rand(3)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)


class Called(Columns):
    """Notes the calls of its forward pass, here and on the meta device that plays a GPU."""

    calls: list[str] = []  # noqa: RUF012  one list for all ranks' models in a process

    def forward(self, features: Tensor) -> Tensor:
        self.calls.append(next(self.parameters()).device.type)
        return super().forward(features)


def calls_of_the_whole_model(degrees: Mapping[str, Any]) -> int:
    Called.calls.clear()
    noted: list[int] = []
    watch = Trial.watch

    def noting(self: Trial, model: nn.Module, trains: bool) -> None:
        watch(self, model, trains)
        noted.append(len(Called.calls))

    with mock.patch.object(Trial, "watch", noting):
        engine_of(MeshCase(dict(degrees)), Declared(seeded(Called), Rows(62), Rows(10)))
    return noted[0]


def test_the_whole_model_runs_on_the_first_rank_alone(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(calls_of_the_whole_model, {"tp": 2}) == [1, 0]


def test_frozen_models_are_placed_with_the_whole_model_and_statistics_follow_them() -> None:
    trial, frozen = Trial.__new__(Trial), nn.Linear(2, 2)
    trial._device, trial._found = torch.device("cuda", 0), Statistics({"sure": torch.ones(())}, {"row": torch.ones(3)})
    trial._beside = LossContext({"teacher": Companion(Auxiliary(), frozen, frozen, None), "value": nn.Linear(2, 2)})
    with (
        mock.patch("drivetrain.engines.mesh.dry_run.placed") as placing,
        mock.patch.object(Trial, "_whole"),
    ):
        trial._watched(nn.Linear(1, 1), trains=True)  # a trained one is a part of the model
    assert placing.call_args.args[2] == [frozen]
    found = trial.statistics(MicroBatch({}, positions=np.arange(2)), torch.device("cpu"))  # where there was no room
    assert found.own is not None
    assert {t.device.type for t in (found.sums["sure"], found.rows["row"], found.own)} == {"cpu"}
