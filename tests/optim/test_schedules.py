"""Learning-rate schedules against PyTorch's and Transformers' own, and functions of the user's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.config.training import Schedule
from drivetrain.errors import UserError
from drivetrain.optim.schedules import lr_factor


def factors(total: int, **schedule: Any) -> list[float]:
    factor = lr_factor(Schedule(**schedule), total)
    return [factor(updates) for updates in range(total)]


def test_constant_stays_at_the_peak() -> None:
    assert factors(5) == [1.0] * 5


def test_warm_up_rises_by_equal_steps_from_above_zero_to_the_peak() -> None:
    assert factors(7, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_a_warm_up_ratio_is_a_share_of_all_steps() -> None:
    for name in ("constant", "linear", "cosine"):
        assert factors(50, name=name, warmup_ratio=0.1) == factors(50, name=name, warmup_steps=5)


def test_linear_falls_by_equal_steps_to_the_final_ratio_after_the_last_update() -> None:
    assert factors(6, name="linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])
    assert factors(4, name="linear", final_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert lr_factor(Schedule(name="linear", final_lr_ratio=0.2), 4)(4) == pytest.approx(0.2)


def test_cosine_is_half_a_wave_down_to_the_final_ratio() -> None:
    half_wave = [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]
    assert factors(8, name="cosine") == pytest.approx(half_wave)
    assert factors(11, name="cosine", warmup_steps=3)[3:] == pytest.approx(half_wave)
    assert factors(8, name="cosine", final_lr_ratio=0.1) == pytest.approx([0.1 + 0.9 * x for x in half_wave])
    after_the_end = lr_factor(Schedule(name="cosine", final_lr_ratio=0.1), 8)
    assert after_the_end(8) == after_the_end(20) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_without_warm_up_schedules_are_those_of_transformers(name: str) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert factors(20, name=name) == pytest.approx(expected)


def test_a_warm_up_of_all_steps_never_divides_by_zero() -> None:
    assert factors(3, name="cosine", warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75])


def rates(make: Any, steps: int) -> list[float]:
    """The rates of a scheduler of PyTorch's kind."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def transformers_rates(name: str, warmup: int, steps: int, **options: Any) -> list[float]:
    from transformers import get_scheduler

    return rates(lambda optimizer: get_scheduler(name, optimizer, warmup, steps, options), steps)


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial_is_that_of_transformers_and_of_pytorch(power: float) -> None:
    ours = factors(20, name="polynomial", power=power)
    assert ours == pytest.approx(transformers_rates("polynomial", 0, 20, power=power, lr_end=0.0))
    own = torch.optim.lr_scheduler.PolynomialLR
    assert ours == pytest.approx(rates(lambda optimizer: own(optimizer, total_iters=20, power=power), 20))
    above = factors(20, name="polynomial", power=power, final_lr_ratio=0.1)
    assert above == pytest.approx(transformers_rates("polynomial", 0, 20, power=power, lr_end=0.1))


@pytest.mark.parametrize("warmup", [0, 4])
def test_inverse_square_root_is_that_of_transformers_after_the_warm_up(warmup: int) -> None:
    ours = factors(40, name="inverse_sqrt", warmup_steps=warmup)
    assert ours[warmup:] == pytest.approx(transformers_rates("inverse_sqrt", warmup, 40)[warmup:])


@pytest.mark.parametrize(("shape", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt")])
def test_a_stable_rate_falls_at_the_end_as_that_of_transformers(shape: str, theirs: str) -> None:
    ours = factors(30, name="wsd", warmup_steps=5, decay_steps=8, decay_shape=shape, final_lr_ratio=0.2)
    options = {"num_decay_steps": 8, "decay_type": theirs, "min_lr_ratio": 0.2}
    assert ours[5:] == pytest.approx(transformers_rates("warmup_stable_decay", 5, 30, **options)[5:])
    assert ours[5:22] == [1.0] * 17


def test_a_decay_ratio_is_a_share_of_all_steps() -> None:
    assert factors(50, name="wsd", warmup_steps=5, decay_ratio=0.2) == factors(
        50, name="wsd", warmup_steps=5, decay_steps=10
    )
    assert factors(4, name="wsd", decay_ratio=1.0) == pytest.approx([1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("rise", [0.3, 0.5])
def test_one_cycle_is_pytorchs(rise: float) -> None:
    def theirs(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20, pct_start=rise, cycle_momentum=False)

    given = {} if rise == 0.3 else {"warmup_ratio": rise}
    assert factors(20, name="onecycle", **given) == pytest.approx(rates(theirs, 20))


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": name, "warmup_steps": 3}
        for name in ("constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd", "onecycle")
    ],
    ids=lambda schedule: schedule["name"],
)
def test_every_schedule_stays_between_nought_and_the_peak_however_long_the_run(schedule: dict[str, Any]) -> None:
    for total in (1, 2, 3, 4, 7, 50):
        for skipped in range(min(total, 4)):
            factor = lr_factor(Schedule(**schedule), total)
            found = [factor(updates, skipped) for updates in range(total - skipped)]
            assert all(0 < value <= 1 for value in found), (total, skipped, found)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "wsd", "onecycle"])
def test_skipped_steps_leave_a_schedule_that_ends_with_the_run(name: str) -> None:
    ended, whole = lr_factor(Schedule(name=name), 20), lr_factor(Schedule(name=name), 15)
    assert ended(14, 5) == pytest.approx(whole(14))


# --- functions of the user's -----------------------------------------------------------------------------------------

OWN = """
def halving(updates, total_updates, every=4):
    return 0.5 ** (updates // every)

def negative(updates, total_updates):
    return 1 - updates

def late(updates, total_updates):
    return {0: 1.0}[updates]

def short(updates):
    return 1.0

def text(updates, total_updates):
    return "high"

number = 3
"""


@pytest.fixture
def own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_schedules.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_schedules"


def test_a_function_of_the_users_rules_the_whole_run(own: str) -> None:
    name = f"{own}:halving"
    assert factors(8, name=name) == [1.0] * 4 + [0.5] * 4
    assert factors(8, name=name, options={"every": 2}, warmup_steps=3)[:3] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("negative", "gives -1 for update 2"),
        ("late", "fails for update 1 of 5: KeyError: 1"),
        ("short", "fails for update 0 of 5: TypeError"),
        ("number", "is a int, no function"),
        ("text", "gives 'high' for update 0"),
        ("halvin", "has no halvin; did you mean"),
    ],
)
def test_what_is_no_schedule_is_a_problem_before_the_first_step(own: str, name: str, words: str) -> None:
    with pytest.raises(UserError, match=r"schedule\.name") as raised:
        lr_factor(Schedule(name=f"{own}:{name}"), 5)
    assert words.partition("; ")[0] in str(raised.value)
    assert len(raised.value.problems) == 1
    assert str(raised.value).count("schedule.name") == 1


def test_an_unknown_name_is_refused_with_the_nearest_and_the_way_to_ones_own() -> None:
    with pytest.raises(ValueError, match=r"known: constant, linear.*package\.module:function; did you mean cosine\?"):
        Schedule(name="cosin")
