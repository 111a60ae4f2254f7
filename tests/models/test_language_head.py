from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from drivetrain.config.language_model import LanguageModelModel
from drivetrain.engines.mesh import tensor_parallel, tensor_plan
from drivetrain.engines.replicas import ThreadReplicas
from drivetrain.measure.memory import TensorPeak
from drivetrain.memory.recompute import apply_recompute
from drivetrain.models import fused_loss, language_head
from drivetrain.models.language_head import TargetHead
from drivetrain.numerics.emulation import fp32_products
from tests.ranks import RankPool

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VOCABULARY = 640
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "phi": {},  # a head with bias
    "gemma2": {"head_dim": 8, "num_key_value_heads": 2, "final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 8.0},
}
FUSED = ("llama", "gpt2", "qwen2", "phi")


def build(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](vocab_size=VOCABULARY, **SIZES, **MODELS[kind], use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind == "phi":
        nn.init.normal_(model.lm_head.bias)
    return model.eval()


def batch(rows: int = 4, length: int = 9, targets: str = "some") -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (rows, length + 1))
    wanted = ids[:, 1:].clone()
    if targets == "some":
        wanted[torch.rand(wanted.shape) < 0.6] = -100
        wanted[0] = -100
    elif targets == "none":
        wanted[:] = -100
    return {"input_ids": ids[:, :-1]}, wanted


def plain_loss(model: nn.Module, inputs: Mapping[str, Tensor], targets: Tensor) -> Tensor:
    logits = model(**inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(model: Any, head: TargetHead, other: Any, targets: str = "some", **batch_size: int) -> None:
    inputs, wanted = batch(targets=targets, **batch_size)
    loss, expected = head.loss_sum(model, inputs, wanted), plain_loss(other, inputs, wanted)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    own, theirs = gradients(model, loss), gradients(other, expected)
    assert own.keys() == theirs.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.fixture
def _slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "SLAB_BYTES", 1)


@pytest.fixture
def head_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the logits that are computed."""
    seen: list[tuple[int, ...]] = []
    linear = F.linear

    def watched(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(weight) == VOCABULARY:
            seen.append(tuple(hidden.shape))
        return linear(hidden, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    return seen


@pytest.mark.parametrize(("kind", "targets"), [*((kind, "some") for kind in MODELS), ("gpt2", "all"), ("gpt2", "none")])
@pytest.mark.parametrize("fused", [False, True], ids=["selected", "fused"])
@pytest.mark.usefixtures("_slabs")
def test_loss_and_gradients_are_those_of_all_logits(kind: str, fused: bool, targets: str) -> None:
    model, other = build(kind), build(kind)
    names = [name for name, _ in model.named_parameters()]
    head = TargetHead(model, fused)
    assert_same(model, head, other, targets)
    assert (head.fallback is None) == (not fused or kind in FUSED)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == list(other.state_dict())


@pytest.mark.parametrize("targets", ["some", "none"])
def test_logits_are_computed_for_targets_alone(targets: str, head_rows: list[tuple[int, ...]]) -> None:
    model = build()
    head, (inputs, wanted) = TargetHead(model, fused=False), batch(targets=targets)
    count = int((wanted != -100).sum())
    head.loss_sum(model, inputs, wanted)
    assert head_rows == [(1, max(1, count), 16)]
    assert count < wanted.numel()


def test_fused_never_has_all_logits(monkeypatch: pytest.MonkeyPatch, head_rows: list[tuple[int, ...]]) -> None:
    calls = []
    given = fused_loss.linear_cross_entropy_sum
    monkeypatch.setattr(fused_loss, "SLAB_BYTES", 1)
    monkeypatch.setattr(language_head, "linear_cross_entropy_sum", lambda *a: (calls.append(1), given(*a))[1])
    model = build()
    head, (inputs, targets) = TargetHead(model, fused=True), batch()
    head_rows.clear()  # of the look at the model
    gradients(model, head.loss_sum(model, inputs, targets))
    assert calls == [1]
    assert not head_rows


@pytest.mark.parametrize(("most", "fuses"), [(4 * 35 * VOCABULARY, False), (4 * 35 * VOCABULARY - 1, True)])
@pytest.mark.usefixtures("_slabs")
def test_auto_fuses_where_logits_are_many(
    most: int, fuses: bool, monkeypatch: pytest.MonkeyPatch, head_rows: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(language_head, "AUTO_FROM", VOCABULARY)
    monkeypatch.setattr(fused_loss, "MANY_BYTES", most)
    model = build()
    head, (inputs, targets) = TargetHead(model, fused="auto"), batch(5, 7, targets="all")
    head_rows.clear()
    assert_same(model, head, build(), "all", rows=5, length=7)
    own, plain_one = ([], [(5, 7, 16)]) if fuses else ([(5, 7, 16)], [(5, 7, 16)])
    assert head_rows == own + plain_one
    losses, tokens = head.losses_and_argmax(model, inputs, targets)
    expected = build()(**inputs).logits.flatten(0, 1)
    torch.testing.assert_close(losses, F.cross_entropy(expected, targets.flatten(), reduction="none"))
    assert torch.equal(tokens, expected.argmax(-1))


def test_auto_leaves_small_vocabularies_as_they_are() -> None:
    model = build()
    head = TargetHead(model, fused="auto")
    assert type(model.lm_head) is nn.Linear
    assert head.fallback is None


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
def test_by_default_the_logits_of_a_large_vocabulary_are_never_held(trains: bool, tmp_path: Any) -> None:
    """Nor their gradient: 2,048 targets over 20,000 tokens in fp32 would be 164 MB each."""
    assert LanguageModelModel(path=str(tmp_path)).fused_loss == "auto"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=20_000, **SIZES, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    head = TargetHead(model, "auto")
    ids = torch.randint(20_000, (8, 257))
    inputs, targets = {"input_ids": ids[:, :-1]}, ids[:, 1:]
    with TensorPeak() as memory:
        if trains:
            head.loss_sum(model, inputs, targets).backward()
        else:
            head.losses_and_argmax(model, inputs, targets)
    assert memory.peak_bytes < 64e6


@pytest.mark.parametrize(
    ("kind", "words"),
    [("gemma2", "changes its logits"), ("granite", "changes its logits"), ("mixed", "no plain linear")],
)
def test_why_the_loss_is_not_fused_is_reported(kind: str, words: str) -> None:
    model = build("llama" if kind == "mixed" else kind)
    if kind == "mixed":
        model.set_output_embeddings(nn.Sequential(nn.Linear(16, VOCABULARY)))
    head = TargetHead(model, fused=True)
    assert head.fallback is not None
    assert words in head.fallback
    assert not model.training


def test_a_model_without_a_known_head_gets_its_loss_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

        def forward(self, input_ids: Tensor) -> Any:
            return transformers.modeling_outputs.CausalLMOutput(logits=self.out(self.embed(input_ids)))

    torch.manual_seed(0)
    model = Own()
    head = TargetHead(model, fused=True)
    assert "names no layer" in str(head.fallback)
    assert_same(model, head, copy.deepcopy(model))
    inputs, targets = batch()
    expected = model(**inputs).logits[targets != -100]
    assert torch.equal(head.logits_at_targets(model, inputs, targets), expected)


@pytest.mark.parametrize("targets", ["some", "all", "none"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.usefixtures("_slabs")
def test_for_evaluation_logits_losses_and_tokens_are_the_models(kind: str, fused: bool, targets: str) -> None:
    model = build(kind)
    inputs, wanted = batch(targets=targets)
    with torch.no_grad():
        expected = model(**inputs).logits[wanted != -100]
    head = TargetHead(model, fused)
    with torch.no_grad():
        torch.testing.assert_close(head.logits_at_targets(model, inputs, wanted), expected)
    losses, tokens = head.losses_and_argmax(model, inputs, wanted)
    torch.testing.assert_close(losses, F.cross_entropy(expected, wanted[wanted != -100], reduction="none"))
    assert torch.equal(tokens, expected.argmax(-1))
    assert losses.dtype == torch.float32
    assert tokens.dtype == torch.int64


@pytest.mark.usefixtures("_slabs")
def test_outside_of_a_loss_the_model_gives_all_logits() -> None:
    model, (inputs, _) = build(), batch()
    expected = build()(**inputs).logits
    TargetHead(model, fused=True)
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("_slabs")
def test_with_recompute_and_dropout_it_is_the_same(fused: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, resid_pdrop=0.3)
        models.append(transformers.GPT2LMHeadModel(config).train())
    model, other = models
    head = TargetHead(model, fused)
    apply_recompute(model)
    inputs, targets = batch()
    torch.manual_seed(2)
    own = gradients(model, head.loss_sum(model, inputs, targets))
    torch.manual_seed(2)
    theirs = gradients(other, plain_loss(other, inputs, targets))
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("_slabs")
def test_autocast_is_respected(fused: bool) -> None:
    model, (inputs, targets) = build(), batch()
    with fp32_products(True), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain_loss(model, inputs, targets)
        head = TargetHead(model, fused)
        loss = head.loss_sum(model, inputs, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(loss, plain_loss(model, inputs, targets), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("_slabs")
def test_a_copy_of_the_model_works_on_its_own() -> None:
    model = build()
    TargetHead(model, fused=True)
    copied = copy.deepcopy(model)
    assert copied.lm_head.owner is not model.lm_head.owner
    assert_same(copied, copied.lm_head.owner, build())


@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.usefixtures("_slabs")
def test_replicas_on_threads_give_all_logits(rows: int) -> None:
    model = build()
    head = TargetHead(model, fused=True)
    replicas = ThreadReplicas(model, 2)
    inputs, targets = batch(rows, targets="all")
    torch.testing.assert_close(head.loss_sum(replicas, inputs, targets), plain_loss(build(), inputs, targets))


# --- spread over ranks ------------------------------------------------------------------------------------------------


def _spread(model: Any, way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp":
        for module in [*model.model.layers, model]:
            fully_shard(module)
        return model  # type: ignore[no-any-return]
    plan = tensor_plan.plan_of(model, None)
    options = {"sequence_parallel": way == "sequence", "loss_parallel": way == "loss"}
    tensor_parallel.split(model, init_device_mesh("cpu", (2,)), plan, **options)
    return model  # type: ignore[no-any-return]


Found = tuple[float, dict[str, Tensor], str | None]
FUSES: tuple[bool | Literal["auto"], ...] = (False, True, "auto")
CASES = [(way, fused, "some") for way in ("ddp", "fsdp", "tensor", "sequence", "loss") for fused in FUSES]
CASES += [("ddp", True, "none"), ("fsdp", True, "none"), ("tensor", False, "none"), ("loss", False, "none")]


def losses_and_gradients() -> list[Found]:
    """On a rank; every rank has the same batch."""
    fused_loss.SLAB_BYTES, fused_loss.MANY_BYTES, language_head.AUTO_FROM = 1, 1, 1
    return [_found(*case) for case in CASES]


def _found(way: str, fused: bool | Literal["auto"], targets: str) -> Found:
    model = build().train()
    head = TargetHead(model, fused)
    wrapped = _spread(model, way)
    inputs, wanted = batch(length=8, targets=targets)
    positions = torch.arange(8).expand(4, 8)
    with loss_parallel(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*view tensor")  # of which FSDP warns
        loss = head.loss_sum(wrapped, {**inputs, "position_ids": positions}, wanted)
        loss.backward()
    whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    return loss.item(), whole, head.fallback


@pytest.fixture(scope="module")
def of_ranks(ranks: Callable[[int], RankPool]) -> list[list[Found]]:
    return ranks(2).run(losses_and_gradients)


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_a_spread_model_gives_the_same(case: int, of_ranks: list[list[Found]]) -> None:
    way, fused, targets = CASES[case]
    model = build().train()
    inputs, wanted = batch(length=8, targets=targets)
    expected = plain_loss(model, inputs, wanted)
    theirs = gradients(model, expected)
    for found in of_ranks:
        loss, own, fallback = found[case]
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)
        words = "a part of the hidden states" if way == "sequence" else "split over ranks" if fused else None
        assert fallback is None if way in ("ddp", "fsdp") or words is None else words in str(fallback)
