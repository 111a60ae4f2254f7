"""The advice: a winner is claimed only beyond the noise of the runs, and what was not tested is stated."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from drivetrain.compare.advice import advice, chosen
from drivetrain.compare.equal_rows import PLACEMENT, SPREAD
from drivetrain.compare.noise import Rates, critical
from drivetrain.compare.result_rows import Comparison, Row
from drivetrain.compare.verdict import judged
from drivetrain.config.run import RunConfig
from tests.compare.made import comparison, report

NEARLY = (0.99, 1.0, 1.01, 1.005, 0.995)  # what repeated runs of a quiet machine have


def seeds(rate: float, accuracy: float = 0.9, **changes: Any) -> list[Any]:
    """Five runs whose rates differ by a percent."""
    return [report(rate * factor, accuracy, **changes) for factor in NEARLY]


def described(found: Comparison, **configs: dict[str, Any]) -> Comparison:
    """Writes the run files of rows: {"workload": ...}."""
    for row in found.rows:
        for number, result in enumerate(row.results):
            config = {"seed": number, **configs[row.label]}
            (result.folder / "run.yaml").write_text(json.dumps(config))
    return found


def disturbed(found: Comparison, label: str, numbers: Sequence[int]) -> Comparison:
    """Marks runs of a row as disturbed by other programs."""
    rows = []
    for row in found.rows:
        results = [
            replace(each, outcome=each.outcome.model_copy(update={"foreign_share": 0.4}))
            if row.label == label and number in numbers
            else each
            for number, each in enumerate(row.results)
        ]
        rows.append(Row(row.label, row.values, tuple(results)))
    return replace(found, rows=tuple(rows))


def test_the_limit_of_two_means_is_students_t() -> None:
    for level, freedom in ((0.05, 8), (0.025, 4), (0.05, float("inf"))):
        assert critical(level, 2, freedom) == pytest.approx(scipy.stats.t.isf(level / 2, freedom), rel=1e-6)
    assert critical(0.05, 4, 16) * 2**0.5 == pytest.approx(4.046, abs=1e-3)  # the published table of q, 4 means, 16


def test_two_rows_are_compared_as_by_students_test_on_logarithms(tmp_path: Path) -> None:
    one, other = (100.0, 130.0, 90.0, 120.0), (150.0, 170.0, 130.0, 190.0)
    found = comparison(tmp_path, a=[report(r) for r in one], b=[report(r) for r in other])
    difference = Rates(found.rows).difference(*found.rows)
    expected = scipy.stats.ttest_ind(*([math.log(r) for r in rates] for rates in (one, other)))
    assert difference.value / difference.error == pytest.approx(expected.statistic)
    assert difference.freedom == expected.df


def test_advice_takes_the_quickest_of_those_as_good(tmp_path: Path) -> None:
    def row(rate: float, accuracy: float, memory: int) -> list[Any]:
        return [report(rate * f, accuracy + (f - 1), memory) for f in NEARLY]

    found = comparison(
        tmp_path, fp32=row(105, 0.91, 2**22), bf16=row(195, 0.91, 2**20), rough=row(400, 0.5, 2**20), broken=[None] * 5
    )
    text = advice(found)
    assert text.startswith(
        "Choose bf16: 1.86 times (1.79 to 1.92 with noise) the samples a second of fp32; slower: fp32"
    )
    assert "accuracy 0.9100; worse by accuracy: rough (0.5000)" in text
    assert "0.25 times its peak tensor memory" in text


def test_advice_keeps_the_reference_where_nothing_as_good_is_quicker(tmp_path: Path) -> None:
    found = comparison(tmp_path, fp32=seeds(100, 0.9), bf16=seeds(70, 0.9), fp16=seeds(500, 0.2))
    assert advice(found).startswith(
        "Choose fp32: nothing as good is quicker; slower: bf16 (0.70 times); accuracy 0.9000"
    )


def test_no_winner_is_named_where_rates_differ_by_noise(tmp_path: Path) -> None:
    found = comparison(tmp_path / "one", fp32=[report(100)], bf16=[report(109)], slow=[report(50)])
    text = advice(found)
    assert text.startswith(
        "No winner: fp32 and bf16 are equally quick but for noise. Keep fp32, the first of them: slower"
    )
    assert "slow (0.46 times)" in text
    assert judged(found).winner is None
    assert chosen(found) is found.rows[0]
    wide = {"fp32": [report(r) for r in (60, 100, 140, 90)], "bf16": [report(r) for r in (95, 130, 165, 100)]}
    assert advice(comparison(tmp_path / "wide", **wide)).startswith("No winner: fp32 and bf16")
    assert advice(comparison(tmp_path / "steady", fp32=seeds(100), bf16=seeds(110))).startswith(
        "Choose bf16: 1.10 times"
    )


def test_one_seed_says_what_was_not_tested(tmp_path: Path) -> None:
    text = advice(comparison(tmp_path / "one", fp32=[report(100)], bf16=[report(200)]))
    assert text.startswith("Choose bf16: 2.00 times")
    assert "Each row is one run of one seed: how speed and accuracy vary from run to run was not tested" in text
    assert "--seeds 5 tests it" in text
    assert "was not tested" not in advice(comparison(tmp_path / "five", fp32=seeds(100), bf16=seeds(200)))


def test_a_run_that_varied_within_is_not_trusted_by_itself(tmp_path: Path) -> None:
    """One run a row: the rates between the points of its curve show noise that the assumed 6 % do not have."""
    found = comparison(tmp_path, fp32=[report(100)], bf16=[report(140)])
    assert judged(found).winner is not None
    for row in found.rows:
        lines = [json.loads(line) for line in (row.results[0].folder / "events.jsonl").read_text().splitlines()]
        for number, line in enumerate(lines):
            line["samples_per_second"] = 100 * (4.0 if number < 5 else 0.25)
        (row.results[0].folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = replace(found, rows=tuple(Row(r.label, r.values, (replace(r.results[0]),)) for r in found.rows))
    assert judged(again).winner is None


def test_a_disturbed_run_is_named_and_does_not_decide(tmp_path: Path) -> None:
    alone = disturbed(comparison(tmp_path / "one", fp32=[report(100)], bf16=[report(300)]), "fp32", [0])
    text = advice(alone)
    assert text.startswith("No row can be chosen: other programs disturbed the runs of fp32, whose speed is therefore")
    assert "Other programs took processor time during fp32 (seed 0: 40%): these rates mean little." in text
    assert chosen(alone) is None
    both = advice(disturbed(alone, "bf16", [0]))
    assert both.startswith("No row can be chosen: other programs disturbed the runs of fp32 and bf16, whose speed")
    made = comparison(tmp_path / "five", fp32=[*seeds(100)[:4], report(10)], bf16=seeds(130))
    assert judged(made).winner is None, "one of five runs was ten times slower"
    assert advice(disturbed(made, "fp32", [4])).startswith("Choose bf16: 1.30 times")


def test_accuracies_are_equal_within_their_standard_error(tmp_path: Path) -> None:
    def over(samples: int, **rows: tuple[float, float]) -> Comparison:
        made = {
            name: [report(rate, right, data={"evaluation_samples": samples})] for name, (rate, right) in rows.items()
        }
        return comparison(tmp_path / str(samples), **made)

    # of 200 samples the difference of two shares near 0.9 has a standard error of 0.029, of 20,000 one of 0.0029
    text = advice(over(200, best=(100, 0.92), quick=(200, 0.90)))
    assert text.startswith("Choose quick: 2.00 times")
    assert "accuracy 0.9000; noise alone makes differences from the best (0.9200) of up to 0.07" in text
    text = advice(over(20000, best=(100, 0.92), quick=(200, 0.90)))
    assert text.startswith("Choose best: ")
    assert "worse by accuracy: quick (0.9000)" in text


def test_accuracies_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """Both rows vary by 0.05 over the seeds, together: the difference of 0.03 is sure all the same."""
    levels = (0.80, 0.90, 0.85, 0.92, 0.78)
    better = [report(100, level + 0.03 + 0.001 * (i % 2)) for i, level in enumerate(levels)]
    worse = [report(300, level) for level in levels]
    text = advice(comparison(tmp_path / "pairs", better=better, worse=worse))
    assert text.startswith("Choose better: ")
    text = advice(comparison(tmp_path / "mixed", better=better[::-1], worse=worse))
    assert text.startswith("Choose worse: 3.00 times")


def test_engines_of_one_precision_do_not_differ_by_accuracy(tmp_path: Path) -> None:
    data = {"evaluation_samples": 10_000}
    found = comparison(
        tmp_path, single=seeds(100, 0.94, data=data), zero2=seeds(31, 0.96, data=data), bf16=seeds(30, 0.5, data=data)
    )
    text = advice(
        described(
            found,
            single={"precision": "fp32", "batch_size": 8, "engine": {"name": "single"}},
            zero2={"precision": "fp32", "batch_size": 8, "engine": {"name": "deepspeed", "stage": 2}, "processes": 2},
            bf16={"precision": "bf16", "batch_size": 8, "engine": {"name": "single"}},
        )
    )
    assert text.startswith("Choose single: nothing as good is quicker; slower: zero2 (0.31 times)")
    assert "Equal but for the engine, so accuracy does not choose between single and zero2 (prove checks it)." in text
    assert "worse by accuracy: bf16" in text


def test_a_batch_for_each_device_makes_engines_other_runs(tmp_path: Path) -> None:
    data = {"evaluation_samples": 10_000}
    found = comparison(tmp_path, single=seeds(100, 0.90, data=data), ddp=seeds(90, 0.96, data=data))
    single, ddp = ({"batch_size_per_device": 8, "engine": {"name": name}} for name in ("single", "ddp"))
    assert advice(described(found, single=single, ddp=ddp)).startswith("Choose ddp")


def test_the_keys_of_placement_are_keys_of_the_run_file() -> None:
    assert RunConfig.model_fields.keys() >= PLACEMENT | SPREAD


def test_a_model_at_chance_chooses_nothing(tmp_path: Path) -> None:
    data = {"evaluation_samples": 300, "largest_class": {"class": "yes", "share": 0.5333}, "classes": 2}
    metrics = {"accuracy": 0.5333, "loss": 0.69, "macro_f1": 0.348}
    made = {"data": data, "metrics": metrics}
    text = advice(comparison(tmp_path / "all", fp32=seeds(100, **made), bf16=seeds(150, **made)))
    assert text.startswith("No row can be chosen: by accuracy every row is at chance (always answering yes has 0.5333)")
    assert "bf16 is the quickest beyond noise" in text
    lucky = {**made, "metrics": {**metrics, "accuracy": 0.56}}  # 0.9 standard errors above
    assert advice(comparison(tmp_path / "lucky", fp32=seeds(100, **lucky), bf16=seeds(150, **lucky))).startswith(
        "No row"
    )
    # engines of one precision are compared by speed, whatever was learned
    found = comparison(tmp_path / "engines", single=seeds(100, **made), ddp=seeds(150, **made))
    single, ddp = ({"batch_size": 8, "engine": {"name": name}} for name in ("single", "ddp"))
    text = advice(described(found, single=single, ddp=ddp))
    assert text.startswith("Choose ddp: 1.50 times")
    assert "At chance by accuracy: single and ddp" in text


def test_a_metric_whose_noise_is_not_known_chooses_nothing(tmp_path: Path) -> None:
    def lossy(rate: float, *losses: float) -> list[Any]:
        best = {"step": 1, "metric": "loss", "value": 1.0}
        return [report(rate * f, metrics={"loss": loss}, best=best) for loss, f in zip(losses, NEARLY, strict=False)]

    found = comparison(tmp_path, slow=lossy(100, 1.0), quick=lossy(200, 1.001), worse=lossy(300, 1.2))
    assert advice(found).startswith(
        "No row can be chosen: how far loss varies by chance is not known (slow 1.0000, worse 1.2000)"
    )
    assert chosen(found) is None
    close = comparison(tmp_path / "close", slow=lossy(100, 1.0), quick=lossy(200, 1.001))
    assert advice(close).startswith("Choose quick: 2.00 times")
    several = comparison(
        tmp_path / "several",
        slow=lossy(100, 1.0, 1.01, 0.99),
        quick=lossy(200, 1.001, 1.005, 0.995),
        worse=lossy(300, 1.2, 1.21, 1.2),
    )
    assert advice(several).startswith("Choose quick: 2.0")
    assert "worse by loss: worse (1.2033)" in advice(several)


def test_a_metric_that_is_not_finite_is_worse(tmp_path: Path) -> None:
    def row(rate: float, loss: float) -> list[Any]:
        return seeds(rate, metrics={"loss": loss}, best={"step": 1, "metric": "loss", "value": loss})

    text = advice(comparison(tmp_path, fine=row(100, 1.0), burst=row(200, float("inf"))))
    assert text.startswith("Choose fine: ")
    assert "worse by loss: burst (inf)" in text


def test_advice_says_when_there_is_none(tmp_path: Path) -> None:
    assert "none completed" in advice(comparison(tmp_path, a=[None]))
    too_short = comparison(tmp_path / "short", a=[report(samples_per_second=None)])
    assert "none ran for enough steps to have a steady rate" in advice(too_short)
    assert "emulated" in advice(comparison(tmp_path / "b", a=[report(emulated=True)], b=[report()]))


def test_advice_never_chooses_what_a_cpu_computed_in_an_engines_place(tmp_path: Path) -> None:
    stand_in = report(500, engaged={"emulated": True})
    text = advice(comparison(tmp_path, single=[report(100)], dp=[stand_in]))
    assert text.startswith("Choose single: the only row that can be considered.")
    assert text.endswith("Not considered: dp on a CPU, whose replicas are threads; its speed does not predict a GPU's.")
    assert "times" not in advice(comparison(tmp_path / "first", dp=[stand_in], single=[report(100)])), "no measure"
    assert advice(comparison(tmp_path / "alone", dp=[stand_in])).startswith("No row can be recommended: dp on a CPU")


def test_advice_on_different_models_names_the_metric_first_and_says_that_they_differ(tmp_path: Path) -> None:
    data = {"evaluation_samples": 1000}
    found = comparison(tmp_path, run=[report(100, 0.6, data=data)], mine=[report(3000, 1.0, data=data)])
    workload = {"type": "text_classification", "data": {"train": "a.csv"}}
    run, mine = ({"workload": {**workload, "model": {"path": model}}} for model in ("bert", "tiny"))
    text = advice(described(found, run=run, mine=mine))
    assert text.startswith("Choose mine: accuracy 1.0000; worse by accuracy: run (0.6000); 30.00 times")
    assert "The rows have different models: their speeds compare those" in text


def test_rows_of_one_model_with_another_kernel_are_settings(tmp_path: Path) -> None:
    found = comparison(tmp_path, run=[report(100, accuracy=0.9)], mine=[report(3000, accuracy=0.9)])
    workload = {"type": "text_classification", "data": {"train": "a.csv"}}
    run, mine = (
        {"workload": {**workload, "model": {"path": "bert", "attention": kernel}}} for kernel in ("sdpa", "eager")
    )
    assert "different models" not in advice(described(found, run=run, mine=mine))
