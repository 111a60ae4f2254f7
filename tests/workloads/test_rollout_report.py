"""Reports on answers and their rewards: means, and warnings where something goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.workloads.rollout_report import History, rollout_metrics

USUAL = {
    "reward": 0.5,
    "answer_tokens": 20.0,
    "truncated": 0.0,
    "groups_without_signal": 0.2,
    "rewards_failed": 0.0,
    "entropy": 1.0,
    "kl": 0.01,
}


def warned(*batches: dict[str, float]) -> list[str]:
    history, found = History(), []
    for each in batches:
        history.add({**USUAL, **each})
        found += history.warnings()
    return found


def test_means_are_over_answers_and_tokens() -> None:
    nan = float("nan")
    made: list[dict[str, Any]] = [
        {"ids": torch.zeros(2 + size), "prompt": 2, "truncated": size == 3, "values": {"a": value}, "failures": {}}
        for size, value in ((1, 1.0), (3, 0.0), (2, nan), (2, 1.0))
    ]
    made[2]["failures"] = {"a": "why"}
    for each, size in zip(made, (1, 3, 2, 2), strict=True):
        each |= {"old": torch.full((size,), -0.5 * size), "reference": torch.full((size,), -0.5 * size)}
    found = rollout_metrics(made, torch.tensor([[1.0, 0.0], [nan, 1.0]]), ["a"])
    assert found == {
        "reward": pytest.approx(2 / 3),
        "reward_deviation": pytest.approx(0.5**0.5 / 2),
        "reward_a": pytest.approx(2 / 3),
        "answer_tokens": 2.0,
        "truncated": 0.25,
        "groups_without_signal": 0.5,
        "rewards_failed": 1.0,
        "entropy": pytest.approx((0.5 + 3 * 1.5 + 2 * 1 + 2 * 1) / 8),
        "kl": 0.0,
    }


def test_the_generators_mismatch_is_over_tokens_whose_draws_are_known() -> None:
    common = {"prompt": 0, "truncated": 0, "values": {}, "failures": {}, "reference": torch.zeros(0)}
    made: list[dict[str, Any]] = [
        {**common, "ids": torch.zeros(2), "old": torch.tensor([-1.0, -2.0]), "drawn": torch.tensor([-1.5, -2.0])},
        {**common, "ids": torch.zeros(1), "old": torch.tensor([-1.0]), "drawn": torch.tensor([0.0])},
        {**common, "ids": torch.zeros(1), "old": torch.tensor([-1.0]), "drawn": torch.zeros(0)},
    ]
    found = rollout_metrics(made, torch.ones(1, 3), [])
    assert (found["mismatch"], found["largest_mismatch"]) == (0.5, 1.0)
    assert "importance_weight" not in found
    for each, weights in zip(made, ([1.0, 0.5], [0.9], [1.0]), strict=True):
        each["correction"] = torch.tensor(weights)
    assert rollout_metrics(made, torch.ones(1, 3), [])["importance_weight"] == pytest.approx(0.8)


def test_a_generator_that_is_far_from_the_trainer_is_warned_of_where_nothing_makes_up_for_it() -> None:
    apart = {"mismatch": 0.2}
    assert "give importance_cap: 2" in " ".join(warned(*[apart] * 9))
    assert warned(*[{**apart, "importance_weight": 0.99}] * 9) == []
    assert warned(*[{"mismatch": 0.01}] * 9) == []


def test_where_groups_are_not_compared_nothing_is_reported_of_them() -> None:
    made = [{"ids": torch.zeros(3), "prompt": 2, "truncated": 0, "values": {}, "failures": {}, "old": torch.zeros(1)}]
    for each in made:
        each["reference"] = torch.zeros(0)
    found = rollout_metrics(made, torch.ones(1, 1), [], by_groups=False)
    assert not found.keys() & {"reward_deviation", "groups_without_signal"}
    history = History()
    for _ in range(9):
        history.add(found)
        assert history.warnings() == []


def test_a_usual_course_is_not_remarked_on() -> None:
    assert warned(*({"reward": 0.3 + 0.01 * number} for number in range(30))) == []


@pytest.mark.parametrize(
    ("later", "why"),
    [
        ({"answer_tokens": 50.0, "truncated": 0.5}, "answers grow"),
        ({"kl": 0.9}, "far from its reference"),
        ({"groups_without_signal": 0.9}, "of the groups have no signal"),
        ({"entropy": 0.05}, "with little variety: 0.05 nats"),
    ],
)
def test_each_sign_is_reported_once(later: dict[str, float], why: str) -> None:
    [warning] = warned(*[{}] * 5, *[later] * 8)
    assert why in warning


def test_a_reward_that_falls_below_its_beginning_has_collapsed() -> None:
    [warning] = warned(*[{"reward": 0.3}] * 5, *[{"reward": 0.8}] * 5, *[{"reward": 0.1}] * 5)
    assert "the reward has collapsed" in warning
    assert "0.8 at best" in warning


def test_a_history_goes_on_where_a_checkpoint_left_it() -> None:
    whole = warned(*[{"reward": 0.3}] * 5, *[{"reward": 0.8}] * 5, *[{"reward": 0.1}] * 5)
    first, second = History(), History()
    for reward in [0.3] * 5 + [0.8] * 4:
        first.add({**USUAL, "reward": reward})
        assert first.warnings() == []
    second.load_state_dict(first.state_dict())
    found = []
    for reward in [0.8] + [0.1] * 5:
        second.add({**USUAL, "reward": reward})
        found += second.warnings()
    assert found == whole


@pytest.mark.parametrize(
    ("count", "size", "first", "last"), [(1, 1, 0.0, 0.0), (4, 2, 0.5, 2.5), (5, 2, 0.5, 3.5), (20, 5, 2.0, 17.0)]
)
def test_a_run_ends_with_the_mean_rewards_of_its_last_and_first_batches(
    count: int, size: int, first: float, last: float
) -> None:
    history = History()
    assert history.means() == {}
    for number in range(count):
        history.add({**USUAL, "reward": float(number)})
    expected = {"batches": size, "reward": last, "first_reward": first, "groups_without_signal": pytest.approx(0.2)}
    assert history.means() == expected
