"""Each loss over pairs against TRL's trainer, values and gradients; those that TRL has not against their papers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.preference import CPO, KTO, LOSSES, ORPO, REWARD, SIMPO
from drivetrain.workloads.base import Batch
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.loss_contract import LossContext, Partial, Statistics
from drivetrain.workloads.preference import PreferenceWorkload
from drivetrain.workloads.preference_losses import FORMULAS
from tests.tiny_language import LLAMA, config, write_lines

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, and those of what it imports
ROWS = [
    {"prompt": f"ask {n}", "chosen": "yes " * (n % 3 + 1), "rejected": "no, never " * (n % 2 + 1)} for n in range(8)
]
SMOOTHED = {"label_smoothing": 0.1}
PUBLISHED: list[dict[str, Any]] = [
    *({"loss": name} for name in ("sigmoid", "hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down")),
    *({"loss": name} for name in ("discopop", "sigmoid_norm", "aot", "aot_unpaired")),
    *({"loss": name, **SMOOTHED} for name in ("exo_pair", "robust", "aot", "aot_unpaired")),
    *({"loss": "sigmoid", "divergence": name} for name in ("forward_kl", "js", "alpha")),
    {"loss": "hinge", "divergence": "alpha", "divergence_alpha": 1.0},
    {"loss": "sigmoid", "ld_alpha": 0.3},
    {"loss": "sigmoid", "likelihood_weights": True},
    {"loss": {"ipo": 0.7, "apo_down": 0.3}, "likelihood_weights": True},
    {"loss": "discopop", "discopop_tau": 0.2},
    {"loss": {"sigmoid": 0.8, "apo_zero": 0.3, "sft": 0.2}},
]
DIVERGENCES = {"js": "js_divergence", "alpha": "alpha_divergence"}


def workload(folder: Path, stage: str = "dpo", **preference: Any) -> PreferenceWorkload:
    path = write_lines(folder / "pairs.jsonl", ROWS)
    made = config(folder, stage=stage, train=path, template="plain", evaluation_fraction=0)
    block = made.preference.model_validate({"reference": "copy" if stage == "dpo" else "none", **preference})
    return PreferenceWorkload(made.model_copy(update={"preference": block}), 0)


def built(work: LanguageModelWorkload) -> nn.Module:
    torch.manual_seed(0)
    return work.build_model()


def moved(model: nn.Module) -> nn.Module:
    """A model that is not far from it."""
    other = copy.deepcopy(model).requires_grad_(False)
    torch.manual_seed(1)
    for parameter in other.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    return other


def whole_batch(work: PreferenceWorkload) -> Batch:
    return work.collate([work.train.load(index, 0) for index in range(len(work.train))])


def loss_of(work: PreferenceWorkload, model: nn.Module, reference: nn.Module, batch: Batch) -> Tensor:
    """The engine's loss of one micro-batch: weighted means of the terms, after their statistics."""
    context = LossContext({"reference": reference})
    if work.has_statistics:
        with torch.no_grad():
            found: Partial = work.statistics(model, batch, context)
        context = LossContext(context.auxiliary, Statistics(rows=found.rows, own=torch.arange(len(ROWS))))
    counts, sums = work.counts(batch), work.loss_sums(model, batch, context)
    return torch.stack([weight * sums[name] / counts[name] for name, weight in work.terms.items()]).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer with our model as it starts and a reference."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("trl")
    work = workload(folder)
    model = built(work)
    work.save_assets(model, folder / "model")
    for name, each in {"model": model, "reference": moved(model)}.items():
        each.save_pretrained(folder / name)
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="sdpa")
        for name in ("model", "reference")
    ]
    # with weights, whose sums over the vocabulary it is then built to make; each test says whether they are used
    arguments = trl.DPOConfig(
        output_dir=str(folder / "out"), report_to=[], use_cpu=True, bf16=False, use_weighting=True
    )
    rows = datasets.Dataset.from_list(ROWS)
    return trl.DPOTrainer(*models, args=arguments, train_dataset=rows, processing_class=work.tokenizer)


def their_inputs(work: PreferenceWorkload) -> dict[str, Tensor]:
    """The batch as TRL has it: padded, all chosen answers before all rejected ones."""
    pairs = [work.train.load(index, 0) for index in range(len(work.train))]
    rows = [pair[side] for side in (0, 1) for pair in pairs]
    shape = len(rows), max(len(ids) for ids, _ in rows)
    found = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask", "completion_mask")}
    for number, (ids, targets) in enumerate(rows):
        found["input_ids"][number, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        found["attention_mask"][number, : len(ids)] = 1
        found["completion_mask"][number, : len(ids)] = torch.from_numpy(targets.astype("int64"))
    return found


def mixture_of(ours: Mapping[str, Any]) -> dict[str, float]:
    return ours["loss"] if isinstance(ours["loss"], dict) else {ours["loss"]: 1.0}


def set_up(trainer: Any, ours: Mapping[str, Any]) -> None:
    mixture = mixture_of(ours)
    trainer.loss_types, trainer.loss_weights = list(mixture), list(mixture.values())
    trainer.beta, trainer.label_smoothing = 0.1, ours.get("label_smoothing", 0.0)
    trainer.ld_alpha, trainer.args.discopop_tau = ours.get("ld_alpha"), ours.get("discopop_tau", 0.05)
    trainer.use_weighting = ours.get("likelihood_weights", False)
    divergence = ours.get("divergence", "reverse_kl")
    trainer.f_divergence_type = DIVERGENCES.get(divergence, divergence)
    trainer.f_alpha_divergence_coef = ours.get("divergence_alpha", 0.5)


@pytest.mark.parametrize("ours", PUBLISHED, ids=str)
def test_a_loss_and_its_gradient_are_those_of_trls_trainer(
    tmp_path: Path, trl_trainer: Any, ours: dict[str, Any]
) -> None:
    work = workload(tmp_path, **ours)
    model = built(work)
    loss = loss_of(work, model, moved(model), whole_batch(work))
    loss.backward()
    set_up(trl_trainer, ours)
    trl_trainer.model.zero_grad()
    expected = trl_trainer._compute_loss(trl_trainer.model, their_inputs(work), False)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    compare(gradients(model), gradients(trl_trainer.model))


def test_likelihoods_are_not_weighted(tmp_path: Path) -> None:
    """TRL weighs the mean of the chosen answers' loss too, by the mean of all pairs' weights."""
    found = {}
    for weighted in (True, False):
        work = workload(tmp_path, loss={"sigmoid": 1.0, "nll": 1.0}, likelihood_weights=weighted)
        model = built(work)
        found[weighted] = work.loss_sums(model, whole_batch(work), LossContext({"reference": moved(model)}))
    sigmoid, nll = work.terms
    assert found[True][nll].item() == pytest.approx(found[False][nll].item(), rel=1e-6)
    assert found[True][sigmoid].item() < 0.95 * found[False][sigmoid].item()


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(each.abs().max()) for each in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * largest)
    assert largest > 0


# --- by their papers --------------------------------------------------------------------------------------------------


def answers(model: nn.Module, work: PreferenceWorkload) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens of the chosen and rejected answers, (N, 2), each answer alone."""
    found, counts = [], []
    for ids, targets in (side for index in range(len(work.train)) for side in work.train.load(index, 0).sides):
        tokens, places = torch.from_numpy(ids.astype("int64")), torch.from_numpy(targets[1:])
        logits = model(input_ids=tokens[None, :-1]).logits[0][places]
        found.append(logits.log_softmax(-1).gather(1, tokens[1:][places][:, None]).sum())
        counts.append(places.sum())
    return torch.stack(found).view(-1, 2), torch.stack(counts).view(-1, 2)


class Found(NamedTuple):
    """Values of the chosen and rejected answers, (N, 2)."""

    ratios: Tensor
    policy: Tensor
    tokens: Tensor


def bco(found: Found) -> Tensor:
    rewards = 0.1 * found.ratios
    shift = rewards.mean().detach()
    return -(torch.sigmoid(rewards[:, 0] - shift).log() + torch.sigmoid(shift - rewards[:, 1]).log()).mean()


def kto(found: Found) -> Tensor:
    of_chosen, of_rejected = (max(0.0, mean) for mean in found.ratios.mean(0).tolist())
    desirable = 1 - torch.sigmoid(0.1 * (found.ratios[:, 0] - of_rejected))
    undesirable = 1 - torch.sigmoid(0.1 * (of_chosen - found.ratios[:, 1]))
    return torch.cat([desirable, undesirable]).mean()


def cdpo(found: Found) -> Tensor:
    right = torch.sigmoid(0.1 * (found.ratios[:, 0] - found.ratios[:, 1]))
    return -(0.9 * right.log() + 0.1 * (1 - right).log()).mean()


def uniform(found: Found) -> Tensor:
    return -F.logsigmoid(0.1 * (found.policy[:, 0] - found.policy[:, 1])).mean()


def rpo(found: Found) -> Tensor:
    preferred = -F.logsigmoid(0.1 * (found.ratios[:, 0] - found.ratios[:, 1])).mean()
    return preferred - 0.5 * (found.policy[:, 0] / found.tokens[:, 0]).mean()


def orpo(found: Found) -> Tensor:
    likelihood = (found.policy / found.tokens).exp()  # of a token, the geometric mean
    odds = likelihood / (1 - likelihood)
    return (-likelihood[:, 0].log() - 0.1 * torch.sigmoid((odds[:, 0] / odds[:, 1]).log()).log()).mean()


def simpo(found: Found) -> Tensor:
    rewards = 2.5 * found.policy / found.tokens
    return -torch.sigmoid(rewards[:, 0] - rewards[:, 1] - 1.4).log().mean()


def cpo(found: Found) -> Tensor:
    return (
        -torch.sigmoid(0.1 * (found.policy[:, 0] - found.policy[:, 1])).log().mean()
        - found.policy[:, 0].sum() / found.tokens[:, 0].sum()
    )


@pytest.mark.parametrize(
    ("stage", "ours", "formula"),
    [
        ("dpo", {"loss": "bco_pair"}, bco),
        ("dpo", {"loss": "kto_pair"}, kto),
        ("dpo", {"loss": "cdpo", **SMOOTHED}, cdpo),
        ("dpo", {"loss": "sigmoid", **SMOOTHED}, cdpo),
        ("dpo", {"reference": "none"}, uniform),
        ("dpo", {"loss": {"sigmoid": 1.0, "nll": 0.5}}, rpo),
        (ORPO, {}, orpo),
        (SIMPO, {"beta": 2.5, "gamma": 1.4}, simpo),
        (CPO, {}, cpo),
    ],
    ids=lambda given: given.__name__ if callable(given) else str(given),
)
def test_a_loss_and_its_gradient_are_those_of_its_paper(
    tmp_path: Path, stage: str, ours: dict[str, Any], formula: Callable[..., Tensor]
) -> None:
    work = workload(tmp_path, stage, **ours)
    model = built(work)
    reference = moved(model)
    loss = loss_of(work, model, reference, whole_batch(work))
    loss.backward()
    found = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    policy, tokens = answers(model, work)
    with torch.no_grad():
        compared, _ = answers(reference, work)
    expected = formula(Found(policy - compared, policy, tokens))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    compare(found, gradients(model))


def test_every_loss_of_the_table_has_a_formula_and_is_tested_here() -> None:
    of_pairs = {name for name, row in LOSSES.items() if row.stages not in ((KTO,), (REWARD,))}
    assert FORMULAS.keys() == of_pairs
    of_trl = {name for ours in PUBLISHED for name in mixture_of(ours)}
    assert of_pairs - of_trl == {"bco_pair", "kto_pair", "cdpo", "nll", "orpo", "simpo", "cpo"}


def test_a_reference_of_another_folder_reads_the_batch_in_its_own_way(tmp_path: Path) -> None:
    """A larger model, whose own head is taken."""
    larger = {**LLAMA, "hidden_size": 48}
    other = LanguageModelWorkload(
        config(tmp_path, [{"instruction": "a", "output": "b"}] * 20, template="plain", model={"config": larger}), 0
    )
    model: Any = built(other)
    model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    work = workload(tmp_path, reference_model=str(tmp_path / "other"))
    policy = built(work)
    auxiliary = work.auxiliary["reference"]
    assert auxiliary.build is not None
    reference = auxiliary.build().eval()
    found = work.loss_sums(policy, whole_batch(work), LossContext({"reference": reference}))["loss"].item()
    ratios = answers(policy, work)[0] - answers(reference, work)[0]
    expected = -F.logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).sum().item()
    assert found == pytest.approx(expected, rel=1e-5)
