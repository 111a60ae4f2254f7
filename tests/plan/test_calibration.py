"""What was measured of this machine is kept, read back, and put between the points that were measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import all_reduce, get_rank, get_world_size

from drivetrain.data.loading_speed import picture_seconds
from drivetrain.errors import UserError
from drivetrain.measure import other_programs
from drivetrain.measure.flops import FlopCount
from drivetrain.plan import calibrate, calibrate_collectives, calibrate_device
from drivetrain.plan import collectives as collectives_of
from drivetrain.plan.calibrate import measured_dtypes
from drivetrain.plan.calibrate_collectives import measured_collectives
from drivetrain.plan.calibrate_device import measured_speeds
from drivetrain.plan.calibrate_repeats import DISTURBED, EXTRA_SECONDS, TRIES, Reading, Repeats
from drivetrain.plan.calibration import Calibration, Curve, DeviceSpeeds, keep, kept, kept_at, seconds_of, usual
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.machines import cluster, this_machine
from drivetrain.plan.speeds import MeasuredSpeeds, speeds_of
from drivetrain.plan.step_costs import Messages
from drivetrain.runtime.hardware import detect
from tests.properties import examples
from tests.ranks import RankPool

Command = Callable[..., tuple[int, str, str]]


def speeds(scale: float = 1.0) -> DeviceSpeeds:
    products: dict[str, Curve] = {"float32": ((1e3, 1e-5 * scale), (1e9, 1e-2 * scale))}
    bytes_: Curve = ((1e3, 1e-6 * scale), (1e8, 1e-2 * scale))
    return DeviceSpeeds(
        matmul=products, attention=products, convolution=products, memory=bytes_, optimizer=bytes_, random=bytes_,
        call_seconds=1e-5,
    )  # fmt: skip


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    """A calibration of this machine; the user's cache is a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = detect()
    return Calibration(
        device=machine.device, device_name=machine.device_name, device_count=machine.device_count,
        cores=machine.cpu_cores, torch=torch.__version__, made_at="2026-11-25T10:00:00", took_seconds=60.0,
        alone=speeds(), together=speeds(2.0), collectives={"all_reduce": ((1024, 1e-4), (1e6, 1e-3))},
        picture_seconds=0.004, disk_write_bytes=1e9,
    )  # fmt: skip


def test_a_calibration_is_read_back_as_it_was_kept(calibration: Calibration) -> None:
    assert kept(detect()) is None
    keep(calibration, kept_at(detect()))
    assert kept(detect()) == calibration


def test_a_broken_file_counts_as_none(calibration: Calibration) -> None:
    keep(calibration, kept_at(detect()))
    kept_at(detect()).write_text(kept_at(detect()).read_text()[:-40])
    assert kept(detect()) is None


@settings(max_examples=examples(100))
@given(power=st.floats(0.3, 1.5), size=st.floats(1.0, 1e12))
def test_a_power_law_is_found_between_its_points_and_the_rate_beyond(power: float, size: float) -> None:
    curve = tuple((10.0**at, 1e-9 * 10.0 ** (at * power)) for at in range(3, 10))
    found = seconds_of(curve, size)
    if size < 1e3:
        assert found == curve[0][1]
    elif size > 1e9:
        assert found == pytest.approx(curve[-1][1] * size / 1e9)
    else:
        assert found == pytest.approx(1e-9 * size**power)


def test_times_that_other_programs_made_longer_do_not_count() -> None:
    assert usual([1.0, 1.1, 1.05, 9.0, 8.0, 7.0, 1.2, 30.0]) < 1.2


def idle() -> Reading:
    """A machine without other programs."""
    return Reading(time.perf_counter(), 0.0, 0.0)


def alone() -> Repeats:
    return Repeats(lambda number: [number], idle)


def everyone(number: float) -> list[float]:
    found = torch.zeros(get_world_size(), dtype=torch.float64)
    found[get_rank()] = number
    all_reduce(found)
    return found.tolist()


def collectives() -> dict[str, Curve]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calibrate_collectives, "BYTES", (1024, 1 << 20))
        patched.setattr(calibrate_collectives, "SECONDS_A_POINT", 0.0)
        return measured_collectives(torch.device("cpu"), Repeats(everyone, idle))


def points_where_the_first_rank_is_slow() -> int:
    def first_is_slow(seconds: float) -> list[float]:
        return everyone(1.0 if seconds and get_rank() == 0 else seconds)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calibrate_device, "SECONDS_A_POINT", 0.0)
        patched.setattr(calibrate_device, "MATMUL_SIZES", (16, 32, 64))
        for name in ("LENGTHS", "CONVOLUTIONS", "ELEMENTS"):
            patched.setattr(calibrate_device, name, getattr(calibrate_device, name)[:1])
        return len(measured_speeds(torch.device("cpu"), ["float32"], Repeats(first_is_slow, idle)).matmul["float32"])


def test_processes_that_measure_together_stop_at_the_same_size(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(points_where_the_first_rank_is_slow) == [1, 1]


def test_two_processes_measure_each_collective(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(collectives):
        assert set(found) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}
        assert all(seconds > 0 for curve in found.values() for _, seconds in curve)


def test_sizes_of_products_are_the_flops_that_pytorch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(_: object, code: Callable[[], object], __: float = 0.0) -> float:
        with FlopCount() as seen:
            code()
        return float(seen.total)

    monkeypatch.setattr(calibrate_device._Clock, "seconds", counted)
    monkeypatch.setattr(calibrate_device, "SLOW", float("inf"))
    monkeypatch.setattr(calibrate_device, "MATMUL_SIZES", (16, 64))
    for name in ("LENGTHS", "CONVOLUTIONS", "ELEMENTS"):
        monkeypatch.setattr(calibrate_device, name, getattr(calibrate_device, name)[:1])
    found = measured_speeds(torch.device("cpu"), ["float32"], alone())
    for curves in (found.matmul, found.attention, found.convolution):
        for size, flops in curves["float32"]:
            assert size == pytest.approx(flops)


def test_a_call_is_timed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_device, "SECONDS_A_POINT", 0.0)
    clock = calibrate_device._Clock(torch.device("cpu"), alone())
    assert 0.02 <= clock.seconds(lambda: time.sleep(0.02)) < 2


def test_pictures_are_timed() -> None:
    assert 1e-4 < picture_seconds() < 1


def test_the_verb_shows_what_was_kept(calibration: Calibration, drivetrain: Command) -> None:
    code, _, err = drivetrain("calibrate", "--show")
    assert code == 2
    assert "run drivetrain calibrate" in err
    keep(calibration, kept_at(detect()))
    code, out, _ = drivetrain("calibrate", "--show")
    assert code == 0
    assert "all_reduce" in out
    assert "each of two at once" in out
    code, out, _ = drivetrain("calibrate", "--show", "--json")
    assert json.loads(out)["alone"]["matmul"]["float32"][0] == [1e3, 1e-5]


@pytest.mark.slow
def test_the_verb_measures_this_machine_and_keeps_it(
    drivetrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = drivetrain("calibrate")
    assert code == 0
    assert "matmul" in out
    assert "kept in" in err
    found = kept(detect())
    assert found is not None
    assert set(found.collectives) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}


def test_between_machines_messages_are_not_as_quick_as_between_two_devices_here(calibration: Calibration) -> None:
    keep(calibration, kept_at(detect()))
    gpus = replace(cluster("8xH100-80GB"), host=detect(), is_here=True).over(2)
    beyond, within = (Messages("all_reduce", "dp", ranks, 1, 1, 2.0**30) for ranks in (16, 8))
    assert speeds_of(gpus, 16).messages(beyond) == pytest.approx(collectives_of.seconds(beyond, gpus))
    assert speeds_of(gpus, 16).messages(within) == MeasuredSpeeds(calibration, 16).messages(within)
    with pytest.raises(UserError, match="the network between several of"):
        speeds_of(this_machine(catalogue()).over(2), 2)


def test_products_in_eight_bits_are_taken_for_those_in_sixteen(calibration: Calibration) -> None:
    quick = calibration.alone.model_copy(update={"matmul": {"float32": ((1e9, 1.0),), "bfloat16": ((1e9, 0.1),)}})
    found = MeasuredSpeeds(calibration.model_copy(update={"alone": quick}), 1)
    assert found.peak_flops("float8") == found.peak_flops("bfloat16") == pytest.approx(1e10)
    assert found.peak_flops("tfloat32") == pytest.approx(1e9), "of a calibration without it"


def test_tf32_is_measured_by_itself_with_both_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = cluster("1xV100").host, cluster("1xA100-80GB").host
    assert "tfloat32" in measured_dtypes(new)
    assert "tfloat32" not in measured_dtypes(old)
    assert "tfloat32" not in measured_dtypes(detect())
    seen = {}

    def noted(_: object, dtype: torch.dtype) -> Curve:
        seen[len(seen)] = (dtype, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        return ((1.0, 1.0),)

    for name in ("_matmul", "_attention", "_convolution"):
        monkeypatch.setattr(calibrate_device, name, noted)
    for name in ("_memory", "_optimizer", "_random"):
        monkeypatch.setattr(calibrate_device, name, lambda _: ((1.0, 1.0),))
    monkeypatch.setattr(calibrate_device, "_call_seconds", lambda _: 1.0)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    found = measured_speeds(torch.device("cpu"), ["float32", "tfloat32"], alone())
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    assert set(found.convolution) == {"float32", "tfloat32"}
    exact, rounded = (torch.float32, "highest", False), (torch.float32, "high", True)
    assert [*seen.values()] == [exact, rounded] * 3


class Machine:
    """Invented readings of two processes that measure at once, each a core busy, beside other programs."""

    def __init__(self, foreign_cores: list[float], seconds: float = 0.01) -> None:
        self._foreign, self._seconds = iter(foreign_cores), seconds
        self._now = Reading(0.0, 0.0, 0.0)
        self.tries = 0

    def measured(self) -> float:
        """A call takes 15 us, or what other programs make of it."""
        self.tries += 1
        foreign, took = next(self._foreign), self._seconds
        clock, busy, own = self._now
        self._now = Reading(clock + took, busy + (2 + foreign) * took, own + took)
        return 15e-6 if foreign < DISTURBED else 3.6e-3 / self.tries

    def repeats(self) -> Repeats:
        return Repeats(lambda number: [number, number], lambda: self._now)


def test_a_figure_that_other_programs_disturbed_is_measured_again() -> None:
    machine = Machine([1.0, 0.8, 0.01, 1.0])
    assert machine.repeats().shortest(machine.measured) == 15e-6
    assert machine.tries == 3


def test_a_figure_that_nothing_disturbed_is_measured_once() -> None:
    machine = Machine([0.05])
    assert machine.repeats().shortest(machine.measured) == 15e-6
    assert machine.tries == 1


def test_of_figures_that_were_all_disturbed_the_shortest_counts() -> None:
    machine = Machine([1.0] * 99)
    assert machine.repeats().shortest(machine.measured) == 3.6e-3 / TRIES


def test_further_tries_end_where_they_would_take_too_long() -> None:
    machine = Machine([1.0] * 99, seconds=0.4 * EXTRA_SECONDS)
    machine.repeats().shortest(machine.measured)
    assert machine.tries == 3, "two further ones, since three would take longer than they may"
    machine.repeats().shortest(machine.measured, 0.3 * EXTRA_SECONDS)
    assert machine.tries == 3 + 1


@pytest.mark.parametrize(("foreign", "is_noted"), [(0.8, True), (0.05, False), (None, False)])
def test_what_other_programs_took_meanwhile_is_noted(
    foreign: float | None,
    is_noted: bool,
    calibration: Calibration,
    drivetrain: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = calibration.model_copy(update={"foreign_cores": foreign})
    monkeypatch.setattr(calibrate, "calibrated", lambda *_: made)
    for words in (["calibrate"], ["calibrate", "--show"]):
        code, _, errors = drivetrain(*words)
        assert code == 0
        assert ("other programs used 0.8 cores while this was measured" in errors) == is_noted
        assert ("note" in errors) == is_noted


def test_a_calibration_states_what_other_programs_took_from_its_start_to_its_end(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = {"clock": 0.0, "busy": 100.0, "own": 7.0}

    def in_processes(*_: object) -> calibrate.Found:
        for name, passed in (("clock", 10.0), ("busy", 18.0), ("own", 10.0)):
            readings[name] += passed
        return calibration.alone, {}

    monkeypatch.setattr(other_programs.time, "perf_counter", lambda: readings["clock"])
    monkeypatch.setattr(other_programs, "busy_seconds", lambda: readings["busy"])
    monkeypatch.setattr(other_programs, "own_seconds", lambda: readings["own"])
    monkeypatch.setattr(calibrate, "_in_processes", in_processes)
    monkeypatch.setattr(calibrate, "picture_seconds", lambda: 1.0)
    monkeypatch.setattr(calibrate, "_disk_write_bytes", lambda _: 1.0)
    monkeypatch.setattr(calibrate, "Repeats", lambda _: alone())
    assert calibrate.calibrated(detect(), lambda _: None).foreign_cores == pytest.approx(0.8)
