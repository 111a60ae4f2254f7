"""The losses of answers with advantages, against TRL's trainers, and against each paper's formula an answer at a
time."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.workloads.made_answers import correction_of
from tests.workloads.policy_cases import LONGEST, ROWS, built, log_probabilities, loss_of, made, workload
from tests.workloads.test_preference_losses import compare, gradients

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, and those of what it imports
CASES: list[dict[str, Any]] = [
    {"loss": "grpo"},
    {"loss": "grpo", "importance": "sequence", "clip": 0.1, "clip_high": 0.3},
    {"loss": "grpo", "beta": 0.2, "delta": 1.4},
    {"loss": "grpo", "beta": 0.2, "kl_ratio": True},
    {"loss": "dr_grpo", "beta": 0.1},
    {"loss": "dapo", "clip_high": 0.28},
    {"loss": "bnpo"},
    {"loss": "cispo", "clip_high": 1.2},
    {"loss": "sapo"},
    {"loss": "luspo"},
    {"loss": "vespo"},
    {"loss": "vespo", "shapes": [1.0, 2.0, 1.5, 1.0]},
]


@pytest.fixture(scope="module")
def trl_trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("trl")
    work = workload(folder)
    model = built(work)
    work.save_assets(model, folder / "model")
    model.save_pretrained(folder / "model")  # type: ignore[operator]
    from transformers import AutoModelForCausalLM

    given = {"report_to": [], "use_cpu": True, "bf16": False, "max_completion_length": LONGEST, "num_generations": 2}
    given |= {"output_dir": str(folder / "out"), "per_device_train_batch_size": 6}
    rows, tokenizer = datasets.Dataset.from_list([{"prompt": row["instruction"]} for row in ROWS]), work.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    found = {}
    for stage, trainer, settings in (
        ("grpo", trl.GRPOTrainer, trl.GRPOConfig),
        ("rloo", trl.RLOOTrainer, trl.RLOOConfig),
    ):
        theirs = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
        found[stage] = trainer(
            theirs, lambda **_: [], args=settings(**given), train_dataset=rows, processing_class=tokenizer
        )
        found[stage].current_gradient_accumulation_steps = 1
    return found


def their_inputs(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch as TRL has it: prompts padded at their beginning, answers at their end."""
    prompts = max(each["prompt"] for each in samples)
    found = {name: torch.zeros(len(samples), prompts, dtype=torch.int64) for name in ("prompt_ids", "prompt_mask")}
    for name in ("completion_ids", "completion_mask"):
        found[name] = torch.zeros(len(samples), LONGEST, dtype=torch.int64)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        found[name] = torch.zeros(len(samples), LONGEST)
    for number, each in enumerate(samples):
        prompt, length = each["prompt"], len(each["ids"]) - each["prompt"]
        found["prompt_ids"][number, -prompt:] = each["ids"][:prompt]
        found["prompt_mask"][number, -prompt:] = 1
        found["completion_ids"][number, :length] = each["ids"][prompt:]
        found["completion_mask"][number, :length] = 1
        found["old_per_token_logps"][number, :length] = each["old"]
        found["ref_per_token_logps"][number, :length] = each["reference"]
    found["advantages"] = torch.tensor([each["advantage"] for each in samples])
    found["num_items_in_batch"] = found["completion_mask"].sum()
    found["old_logps"] = found["old_per_token_logps"].sum(1)
    return found


def set_up(trainer: Any, work: Any) -> None:
    ours, args = work._config.reinforcement, trainer.args
    trainer.loss_type, trainer.importance_sampling_level = work._loss, work._importance
    low, high = ours.bounds
    trainer.epsilon_low, trainer.epsilon_high = 1 - low, (ours.clip_high if work._loss == "cispo" else high - 1)
    trainer.beta, args.delta, args.use_bias_correction_kl = ours.beta, ours.delta, ours.kl_ratio
    args.sapo_temperature_pos, args.sapo_temperature_neg = ours.temperatures
    args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg = ours.shapes


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ours", CASES, ids=str)
def test_a_loss_and_its_gradient_are_those_of_trls_trainer(
    tmp_path: Path, trl_trainers: dict[str, Any], ours: dict[str, Any], packing: bool
) -> None:
    check(workload(tmp_path, **ours, data={"packing": packing}), trl_trainers["grpo"])


def test_rloo_and_its_gradient_are_those_of_trls_trainer(tmp_path: Path, trl_trainers: dict[str, Any]) -> None:
    check(workload(tmp_path, "rloo", clip=0.3), trl_trainers["rloo"])


@pytest.mark.parametrize("loss", ["grpo", "dapo", "cispo", "luspo"])
def test_weights_of_tokens_are_those_of_trls_importance_correction(
    tmp_path: Path, trl_trainers: dict[str, Any], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which weighs the loss of the ratios, not the divergence from the reference."""
    bound = {"clip_high": 1.2} if loss == "cispo" else {}
    work = workload(tmp_path, loss=loss, beta=0.2, importance_cap=1.5, **bound)
    model, samples, trainer = built(work), made(), trl_trainers["grpo"]
    inputs = their_inputs(samples)
    inputs["importance_sampling_ratio"] = torch.ones(len(samples), LONGEST)
    for number, each in enumerate(samples):
        each["drawn"] = each["old"] + torch.linspace(-0.8, 0.9, len(each["old"]))
        each["correction"] = correction_of(each, work._config.reinforcement)
        ratios = (each["old"] - each["drawn"]).exp().clamp(max=1.5)
        inputs["importance_sampling_ratio"][number, : len(ratios)] = ratios
    unweighed = [{**each, "correction": torch.ones_like(each["old"])} for each in samples]
    loss_sum = loss_of(work, model, samples)
    assert abs(loss_sum.item() - loss_of(work, model, unweighed).item()) > 1e-3
    loss_sum.backward()
    set_up(trainer, work)
    monkeypatch.setattr(trainer, "use_vllm", True)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_correction", True)
    trainer.model.zero_grad()
    expected = trainer._compute_loss(trainer.model.eval(), inputs)
    expected.backward()
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-4)
    compare(gradients(model), gradients(trainer.model))


def check(work: Any, trainer: Any) -> None:
    model, samples = built(work), made()
    loss = loss_of(work, model, samples)
    loss.backward()
    set_up(trainer, work)
    trainer.model.zero_grad()
    expected = trainer._compute_loss(trainer.model.eval(), their_inputs(samples))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)  # ratios are exponentials
    compare(gradients(model), gradients(trainer.model))


# --- by their papers --------------------------------------------------------------------------------------------------


def by_hand(loss: str, policy: list[Tensor], samples: list[dict[str, Any]]) -> Tensor:
    """Each paper's formula at its usual settings, one answer after the other."""
    found, tokens = [], sum(map(len, policy))
    for logs, each in zip(policy, samples, strict=True):
        ratio, advantage = (logs - each["old"]).exp(), each["advantage"]
        whole = (logs - each["old"]).sum()
        match loss:
            case "grpo" | "dr_grpo" | "dapo" | "bnpo":
                gains = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                share = {"grpo": 1 / len(logs) / len(samples), "dr_grpo": 1 / LONGEST / len(samples)}
                found.append(gains.sum() * share.get(loss, 1 / tokens))
            case "cispo":
                found.append((ratio.detach().clamp(max=5.0) * advantage * logs).sum() / tokens)
            case "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                found.append((torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage).mean() / len(samples))
            case "luspo":
                mean = (whole / len(logs)).exp()
                gain = torch.minimum(mean * advantage, mean.clamp(0.8, 1.2) * advantage)
                found.append(gain * len(logs) / len(samples))
            case "vespo":
                k, lam = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
                weight = whole.detach().exp() ** k * torch.exp(lam - lam * whole.detach().exp())
                found.append((weight * advantage * logs).sum() / tokens)
            case "rloo":
                gain = torch.minimum(whole.exp() * advantage, whole.exp().clamp(0.8, 1.2) * advantage)
                found.append(gain / len(samples))
    return -torch.stack(found).sum()


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo", "rloo"])
def test_a_loss_is_its_papers_formula(tmp_path: Path, loss: str) -> None:
    work = workload(tmp_path, "rloo" if loss == "rloo" else "grpo", loss=loss)
    model, samples = built(work), made(reference=False)
    value = loss_of(work, model, samples)
    value.backward()
    other: nn.Module = built(work)
    expected = by_hand(loss, [log_probabilities(other, each) for each in samples], samples)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    compare(gradients(model), gradients(other))


def test_log_probabilities_are_those_at_the_temperature_of_the_draws(tmp_path: Path) -> None:
    work, samples = workload(tmp_path, temperature=0.7), made(reference=False)
    model = built(work)
    expected = by_hand("grpo", [log_probabilities(model, each, 0.7) for each in samples], samples)
    assert loss_of(work, model, samples).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_masked_answer_counts_and_teaches_nothing(tmp_path: Path) -> None:
    """Yu et al. 2025: overlong answers are filtered; the mean over answers still counts them, as TRL's does."""
    work, samples = workload(tmp_path), made(reference=False)
    samples[1]["learned"] = 0
    model = built(work)
    without = samples[:1] + samples[2:]
    expected = by_hand("grpo", [log_probabilities(model, each) for each in without], without) * 5 / 6
    assert loss_of(work, model, samples).item() == pytest.approx(expected.item(), rel=1e-5)


def test_old_answers_that_are_new_have_ratio_one(tmp_path: Path) -> None:
    work, samples = workload(tmp_path), made(reference=False)
    model = built(work)
    for each in samples:
        each["old"] = log_probabilities(model, each).detach()
    mean = sum(each["advantage"] for each in samples) / len(samples)
    assert loss_of(work, model, samples).item() == pytest.approx(-mean, rel=1e-4)
    assert not math.isclose(mean, 0)


# --- weights for a generator with other probabilities -----------------------------------------------------------------


def trls_weights(samples: list[dict[str, Any]], mode: str, least: float | None, largest: float | None) -> Tensor:
    """The weights that TRL's trainer computes: the statement that does it is taken out of its method and run."""
    from trl import GRPOTrainer

    text = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    [found] = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "per_token_logps_diff" in ast.unparse(node)
    ]
    bounds = {"vllm_importance_sampling_clip_min": least, "vllm_importance_sampling_clip_max": largest}
    trainer = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode, **bounds
    )
    inputs = their_inputs(samples)
    drawn = torch.zeros(len(samples), LONGEST)
    for number, each in enumerate(samples):
        drawn[number, : len(each["drawn"])] = each["drawn"]
    scope: dict[str, Any] = {"self": trainer, "torch": torch, "math": math, "tool_mask": None}
    scope["sampling_per_token_logps"] = drawn
    scope |= {"completion_mask": inputs["completion_mask"], "old_per_token_logps": inputs["old_per_token_logps"]}
    exec(compile(ast.Module([found], []), "trl", "exec"), scope)
    weights: Tensor = scope["vllm_importance_sampling_ratio"]
    return weights.expand(len(samples), LONGEST)


@pytest.mark.parametrize("bounds", [(None, 1.5), (0.6, None), (0.6, 1.5)], ids=str)
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_of_each_form_are_those_of_trl(
    tmp_path: Path, mode: str, bounds: tuple[float | None, float | None], trl_trainers: dict[str, Any]
) -> None:
    assert trl_trainers, "TRL is there"
    least, largest = bounds
    given = {"importance_floor": least, "importance_cap": largest, "importance_correction": mode}
    learning = workload(tmp_path, **{name: value for name, value in given.items() if value is not None})._learning
    samples = made()
    for number, each in enumerate(samples):
        each["drawn"] = each["old"] + torch.linspace(-0.8, 0.9, len(each["old"])) * (0.1 if number % 2 else 1.0)
    expected = trls_weights(samples, mode, least, largest)
    for number, each in enumerate(samples):
        found = correction_of(each, learning)
        torch.testing.assert_close(found, expected[number, : len(found)], rtol=1e-5, atol=0)
    assert len(expected.unique()) > 2
