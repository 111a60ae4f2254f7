"""Proximal policy optimization: advantages over time, the value head's loss, and both terms against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.distributed.communicator import Communicator
from drivetrain.generation.passes import Passes
from drivetrain.workloads.advantages import gae, whitened
from drivetrain.workloads.loss_contract import LossContext
from drivetrain.workloads.ppo import PpoWorkload
from tests.tiny_workload import tiny_engine
from tests.workloads.policy_cases import configured, log_probabilities, made

LETTERS = {"use": "tests.rewards.scores:letters"}


def workload(folder: Path, **given: Any) -> PpoWorkload:
    return PpoWorkload(configured(folder, "ppo", **{"answers": 2, **given}), seed=0)


def test_advantages_are_the_decayed_sum_of_later_surprises() -> None:
    """Schulman et al. 2016, equation 16, term by term."""
    rewards, values, gamma, decay = torch.rand(7), torch.rand(7), 0.9, 0.8
    later = torch.cat([values[1:], torch.zeros(1)])
    surprises = rewards + gamma * later - values
    expected = [sum((gamma * decay) ** (s - t) * surprises[s] for s in range(t, 7)) for t in range(7)]
    torch.testing.assert_close(gae(rewards, values, gamma, decay), torch.stack(expected))


def test_whitened_advantages_have_mean_0_and_deviation_1_over_all_answers() -> None:
    parts = whitened([torch.rand(3), torch.rand(5) + 4, torch.rand(1)])
    assert [len(each) for each in parts] == [3, 5, 1]
    whole = torch.cat(parts)
    assert (float(whole.mean()), float(whole.std())) == (pytest.approx(0, abs=1e-6), pytest.approx(1, rel=1e-5))


def loss_by_hand(model: Any, head: nn.Linear, samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Both terms, one answer after the other; the hidden states are Transformers' own."""
    policy, value, count = [], [], sum(len(each["old"]) for each in samples)
    for each in samples:
        ids, prompt = each["ids"].long(), each["prompt"]
        hidden = model(input_ids=ids[None, :-1], output_hidden_states=True).hidden_states[-1][0, prompt - 1 :]
        values, ratio = head(hidden)[:, 0], (log_probabilities(model, each) - each["old"]).exp()
        gains = torch.minimum(ratio * each["advantages"], ratio.clamp(0.8, 1.2) * each["advantages"])
        near = torch.clamp(values, each["old_values"] - 0.2, each["old_values"] + 0.2)
        errors = torch.maximum((values - each["returns"]) ** 2, (near - each["returns"]) ** 2)
        policy.append(-gains.sum())
        value.append(errors.sum() / 2)
    return torch.stack(policy).sum() / count, torch.stack(value).sum() / count


@pytest.mark.parametrize("packing", [True, False])
def test_both_terms_and_their_gradients_are_the_papers(tmp_path: Path, packing: bool) -> None:
    work = workload(tmp_path, data={"packing": packing})
    torch.manual_seed(3)
    model, head = work.build_model().eval(), nn.Linear(32, 1)
    samples = made()
    for each in samples:
        size = len(each["old"])
        each |= {name: torch.randn(size) for name in ("advantages", "old_values", "returns")}
    batch = work.collate(samples)
    sums, counts = work.loss_sums(model, batch, LossContext({"value": head})), work.counts(batch)
    expected = loss_by_hand(model, head, samples)
    for name, theirs in zip(("loss", "value"), expected, strict=True):
        ours = sums[name] / counts[name]
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
        parameters = [*model.parameters(), *head.parameters()]
        found = torch.autograd.grad(ours, parameters, retain_graph=True, allow_unused=True)
        wanted = torch.autograd.grad(theirs, parameters, retain_graph=True, allow_unused=True)
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_policy_runs_once_over_a_batch_of_answers(tmp_path: Path) -> None:
    work = workload(tmp_path, temperature=1.5)
    torch.manual_seed(3)
    model, head = work.build_model().eval(), nn.Linear(32, 1)
    samples = [{**each, "learned": 1} for each in made()]
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        found = work._known(model, work.collate(samples), LossContext({"value": head}))
        assert len(calls) == 1
        for each, sample in zip(found, samples, strict=True):
            torch.testing.assert_close(each["old"], log_probabilities(model, sample, 1.5), rtol=1e-4, atol=1e-5)
            assert len(each["old_values"]) == len(each["old"])


def test_a_run_does_not_warn_of_groups(tmp_path: Path) -> None:
    work = workload(tmp_path, rewards=LETTERS, answers=1)
    torch.manual_seed(3)
    passes = Passes(tiny_engine(work), work, Communicator(), 4)
    for step in range(6):
        work.keep_made(
            step, [each for group in work.make_samples([work.train.load(0, 0)], [step], passes) for each in group]
        )
        report = work.rollout()
        assert not [each for each in report.warnings if "groups" in each]
        assert "groups_without_signal" not in report.metrics


def test_an_answers_reward_comes_at_its_end_less_the_divergence_on_the_way(tmp_path: Path) -> None:
    work = workload(tmp_path, rewards=LETTERS, beta=0.3)
    torch.manual_seed(3)
    engine = tiny_engine(work)
    passes = Passes(engine, work, Communicator(), 4)
    samples = [each for group in work.make_samples([work.train.load(0, 0)], [5], passes) for each in group]
    assert [bool(each["old_values"].any()) for each in samples] == [False, False], "the head begins with zeros"
    for each in samples:
        each["reference"] = each["old"] - 0.5
    work.keep_made(0, samples)
    for each in work.made:
        size = len(each["old"])
        steps = torch.full((size,), -0.3 * 0.5)
        steps[-1] += each["reward"]
        torch.testing.assert_close(each["returns"], gae(steps, torch.zeros(size), 1.0, 0.95))
    whole = torch.cat([each["advantages"] for each in work.made])
    assert float(whole.mean()) == pytest.approx(0, abs=1e-5)
