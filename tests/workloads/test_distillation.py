"""Each divergence from a teacher against TRL's and against its formula in plain PyTorch, values and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.errors import UserError
from drivetrain.models.divergences import Divergence, divergences
from drivetrain.workloads.base import Batch
from drivetrain.workloads.distillation import DistillationWorkload
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.loss_contract import LossContext
from tests.tiny_language import LLAMA, ROWS, config, plain_loss, write_lines

LOSSES: list[dict[str, Any]] = [
    {"loss": "forward_kl"},
    {"loss": "reverse_kl"},
    {"loss": "js"},
    {"loss": "js", "beta": 0.1, "temperature": 2.0},
    {"loss": {"forward_kl": 0.7, "sft": 0.3}, "temperature": 3.0},
]


def teacher_in(folder: Path, seed: int = 5, **more: Any) -> Path:
    """A teacher of other sizes than the model, with its tokenizer."""
    made = config(folder, ROWS, model={"config": {**LLAMA, "hidden_size": 48, "num_hidden_layers": 3}, **more})
    work = LanguageModelWorkload(made, 0)
    torch.manual_seed(seed)
    model: Any = work.build_model()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 20  # so that its distributions are far from even
    model.save_pretrained(folder / "teacher")
    work.tokenizer.save_pretrained(folder / "teacher")
    return folder / "teacher"


def distilled(folder: Path, teacher: Path | None = None, **given: Any) -> DistillationWorkload:
    path = str(teacher or teacher_in(folder))
    data = given.pop("data", {})
    made = config(folder, ROWS, "distill", template="chatml", **data)
    block = made.distillation.model_validate({"teacher": path, **given})
    return DistillationWorkload(made.model_copy(update={"distillation": block}), 0)


def both(work: DistillationWorkload) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = work.build_model()
    build = work.auxiliary["teacher"].build
    assert build is not None
    return model, build().eval()


def batch_of(work: DistillationWorkload, count: int = 7) -> Batch:
    return work.collate([work.train.load(index, 0) for index in range(count)])


def loss_of(work: DistillationWorkload, model: nn.Module, teacher: nn.Module, batch: Batch) -> Tensor:
    sums, counts = work.loss_sums(model, batch, LossContext({"teacher": teacher})), work.counts(batch)
    return torch.stack([weight * sums[name] / counts[name] for name, weight in work.terms.items()]).sum()


def by_hand(name: str, student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """The paper's equations, of one target: logits (V,)."""
    own, other = (student / temperature).softmax(0), (teacher / temperature).softmax(0)
    mixed = beta * other + (1 - beta) * own
    return {
        "forward_kl": lambda: (other * (other / own).log()).sum(),
        "reverse_kl": lambda: (own * (own / other).log()).sum(),
        "js": lambda: beta * (other * (other / mixed).log()).sum() + (1 - beta) * (own * (own / mixed).log()).sum(),
    }[name]()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("given", LOSSES, ids=str)
def test_a_loss_and_its_gradient_are_those_of_plain_pytorch(
    tmp_path: Path, given: dict[str, Any], packing: bool
) -> None:
    work = distilled(tmp_path, **given, data={"packing": packing})
    model, teacher = both(work)
    loss_of(work, model, teacher, batch_of(work)).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    loss = loss_of(work, model, teacher, batch_of(work)).item()
    model.zero_grad()
    mixture = given["loss"] if isinstance(given["loss"], dict) else {given["loss"]: 1.0}
    sums: Tensor = torch.zeros(())
    count = 0
    for index in range(7):
        ids, trained = work.train.load(index, 0)
        losses, own, _ = plain_loss(model, ids, trained)
        _, other, _ = plain_loss(teacher, ids, trained)
        count += len(losses)
        for name, weight in mixture.items():
            settings = given.get("beta", 0.5), given.get("temperature", 1.0)
            pairs = zip(own, other.detach(), strict=True)
            found = losses.sum() if name == "sft" else sum(by_hand(name, *pair, *settings) for pair in pairs)
            sums = sums + weight * found
    expected = sums / count
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5 * largest)
    assert largest > 0


@pytest.mark.filterwarnings("ignore")  # TRL's own, and those of what it imports
@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("js", 0.5), ("js", 0.3)])
def test_divergences_and_their_gradients_are_those_of_trl(kind: Any, beta: float) -> None:
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(11, 40, generator=generator) for _ in range(2))
    found = []
    for compute in (
        lambda own: divergences(own, teacher, Divergence(kind, beta, 1.7)).sum(),
        lambda own: GKDTrainer.generalized_jsd_loss(own, teacher, beta=beta, temperature=1.7, reduction="sum"),
    ):
        own = student.clone().requires_grad_()
        loss = compute(own)
        loss.backward()
        found.append((loss.detach(), own.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "js"])
def test_logits_of_16_bits_and_many_rows_get_the_gradients_of_plain_pytorch(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.models.cross_entropy.BYTES_AT_ONCE", 400)  # two rows at a time
    generator = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(7, 50, generator=generator).bfloat16() for _ in range(2))
    own, same = student.clone().requires_grad_(), student.float().requires_grad_()
    weights = torch.arange(7.0)
    (divergences(own, teacher, Divergence(kind)) * weights).sum().backward()
    rows = zip(same, teacher.float(), strict=True)
    (torch.stack([by_hand(kind, *pair, 0.5, 1.0) for pair in rows]) * weights).sum().backward()
    assert own.grad is not None
    assert same.grad is not None
    assert own.grad.dtype == torch.bfloat16
    torch.testing.assert_close(own.grad.float(), same.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "js"])
def test_a_divergence_of_nearly_equal_models_keeps_its_digits_in_fp32(kind: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    student = torch.randn(8, 5000, generator=generator)
    teacher = student + 0.02 * torch.randn(8, 5000, generator=generator)
    exact = [by_hand(kind, own.double(), other.double(), 0.5, 1.0) for own, other in zip(student, teacher, strict=True)]
    found = divergences(student, teacher, Divergence(kind))
    assert found.tolist() == pytest.approx([each.item() for each in exact], rel=1e-4)


def test_a_teacher_that_rules_a_token_out_gives_finite_numbers() -> None:
    teacher = torch.tensor([[0.0, 1.0, -torch.inf]])
    for kind in ("forward_kl", "js"):
        own = torch.zeros(1, 3, requires_grad=True)
        divergences(own, teacher, Divergence(kind)).sum().backward()
        assert own.grad is not None
        assert bool(own.grad.isfinite().all())


def test_rows_of_a_wider_head_beyond_the_tokens_are_left_out(tmp_path: Path) -> None:
    wide = {**LLAMA, "hidden_size": 48, "vocab_size": 320}
    work = distilled(tmp_path, teacher_in(tmp_path, config=wide), loss="forward_kl")
    model, teacher = both(work)
    other = work._teachers(batch_of(work), LossContext({"teacher": teacher}))
    assert other.shape[1] == 320
    assert loss_of(work, model, teacher, batch_of(work)).item() > 0


def test_a_model_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    teacher = teacher_in(tmp_path)
    work = distilled(tmp_path, teacher)
    _, model = both(work)
    model.train().requires_grad_(True)
    loss = loss_of(work, model, both(work)[1], batch_of(work))
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert max(float(each.grad.abs().max()) for each in model.parameters() if each.grad is not None) < 1e-6


def test_an_evaluation_reports_both_models(tmp_path: Path) -> None:
    work = distilled(tmp_path, loss={"js": 1.0, "sft": 0.5})
    model, teacher = both(work)
    found = work.outputs_in(model, batch_of(work), LossContext({"teacher": teacher}))
    values = {}
    for name, metric in work.metrics().items():
        metric.update(found.predictions, found.targets)
        values[name] = float(metric.compute())
    assert found.terms["sft"][0].item() / found.terms["sft"][1] == pytest.approx(values["sft_loss"], rel=1e-5)
    assert values["teacher_loss"] > values["sft_loss"]  # it is sure of what is wrong
    assert 0 <= values["teacher_agreement"] <= 1
    assert work.derived(values)["perplexity"] == pytest.approx(torch.tensor(values["sft_loss"]).exp().item())


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "other.jsonl", ROWS)
    work = LanguageModelWorkload(config(tmp_path, train=rows, model={"tokenizer": "characters"}), 0)
    work.build_model().save_pretrained(tmp_path / "teacher")  # type: ignore[operator]
    work.tokenizer.save_pretrained(tmp_path / "teacher")
    why = r"distillation.teacher.path: .*has other tokens \(\d+\) than the model \(259\)"
    with pytest.raises(UserError, match=why):
        distilled(tmp_path, tmp_path / "teacher")


def test_a_teacher_whose_context_is_too_short_is_refused(tmp_path: Path) -> None:
    short = teacher_in(tmp_path, config={**LLAMA, "max_position_embeddings": 64})
    work = distilled(tmp_path, short, data={"length": 100})
    build = work.auxiliary["teacher"].build
    assert build is not None
    work.build_model()
    with pytest.raises(UserError, match=r"length \(100\) > the teacher's context \(64"):
        build()


def test_a_teacher_that_cannot_be_packed_beside_a_model_that_is_packed_is_refused(tmp_path: Path) -> None:
    bloom = teacher_in(tmp_path, config={"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4})
    work = distilled(tmp_path, bloom)
    with pytest.raises(UserError, match=r"cannot take samples end to end in a row"):
        both(work)
    padded = distilled(tmp_path, bloom, data={"packing": False})
    assert loss_of(padded, *both(padded), batch_of(padded)).item() > 0
