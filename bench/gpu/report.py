"""Writes the page of `make gpu-report`: the parts' results as one page, goals reached and missed among them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.gpu.__main__ import PARTS
from bench.gpu.cases import Record, Result
from bench.gpu.setting import Setting

TITLE = "# drivetrain on {device}"
REHEARSAL = (
    "**A rehearsal on a CPU.** Sizes are small, times mean nothing, and nothing here was shown on a GPU: this page "
    "only shows that every part runs."
)
# sides of a bench's setting: ours, theirs, what their ratio of rates is to reach at least, and of memory at most
RATIOS: dict[str, list[tuple[str, str, float, float | None]]] = {
    "bench-sft": [
        ("ours, bf16-mixed", "trl", 1.5, 0.7),
        ("ours, recomputed", "trl", 1.5, 0.7),
        ("ours, bf16-mixed", "trainer", 1.2, None),
        ("ours, padded", "plain loop, padded", 1.0, None),
        ("ours", "trl", 1.5, 0.7),
    ],
    "bench-pretrain": [
        ("ours, bf16-mixed", "trainer", 1.2, None),
        ("ours, bf16-mixed", "plain loop", 1.0, None),
        ("ours, bf16-mixed, all logits", "plain loop", 1.0, None),
        ("ours", "trainer", 1.2, None),
    ],
    "bench-images": [("ours, bf16-mixed", "trainer", 1.2, None), ("ours, bf16-mixed", "plain loop", 1.0, None)],
    "bench-texts": [("ours, bf16-mixed", "trainer", 1.2, None), ("ours, bf16-mixed", "plain loop", 1.0, None)],
}
# benchmarks/llama3_h100_202412_torchtitan.md in torchtitan's repository
CONTEXT = (
    "As context, measured by others: torchtitan's benchmarks of December 2024 have 5,762 tokens a second and GPU for "
    "Llama 3.1 8B under FSDP on 8 H100s (96 GB, 500 W), 6,667 compiled; 33 to 39 % of the peak."
)
SHARES = {("1B", "ours, bf16-mixed"): 0.40, ("1B", "ours, bf16-master"): 0.45}  # of the device's peak, in pre-training
Sides = dict[str, list[dict[str, Any]]]


def write_page(setting: Setting) -> int:
    """Writes the page of the device. Returns the exit code: 1 where there are no results."""
    records = {part: Record(setting.folder / f"{part}.json") for part in PARTS}
    if not any(record.results for record in records.values()):
        print(f"no results in {setting.folder}: run `make gpu` first")
        return 1
    setting.page.write_text(page(setting, records))
    print(f"written to {setting.page}")
    return 0


def page(setting: Setting, records: dict[str, Record]) -> str:
    stamps = [record.stamp for record in records.values() if record.stamp]
    device = "a CPU" if setting.small else stamps[0]["device"]
    lines = [TITLE.format(device=device), "", *([REHEARSAL, ""] if setting.small else [])]
    lines += [f"`make gpu` and `make gpu-report` made this page. {_dates(stamps)}", "", _machine(stamps[-1]), ""]
    for part, record in records.items():
        lines += [f"## {part}", ""]
        body = list(_section(part, record.results, with_goals=not setting.small)) if record.results else ["Not run."]
        lines += [*body, *_not_done(record.results), ""]
    return "\n".join(lines).rstrip() + "\n"


def _dates(stamps: Sequence[dict[str, Any]]) -> str:
    dates = sorted({stamp["date"] for stamp in stamps})
    return f"Measured on {dates[0]}." if len(dates) == 1 else f"Measured from {dates[0]} to {dates[-1]}."


def _machine(stamp: dict[str, Any]) -> str:
    software = {name: value for name, value in stamp["software"].items() if name != "device"}
    versions = {"Python": stamp["python"], **software, **stamp["packages"]}
    told = ", ".join(f"{name} {value}" for name, value in versions.items() if name != "GPU")
    return f"{stamp['platform']}, {stamp['cores']} CPU cores; {told}."


# --- parts that pass or fail -----------------------------------------------------------------------------------------


def _doctor(part: str, results: dict[str, Result]) -> Iterator[str]:
    del part
    for name, result in results.items():
        if result.status in ("done", "missed") and "why" in result.found:
            yield f"- {name}: {result.found['why']}"
    found = results.get("findings")
    if found is not None and found.status == "done":
        doctor = found.found["doctor"]
        answers = {**doctor["precisions"], **doctor["tries"]}
        yield "- " + "; ".join(f"{name}: {state}" for name, (state, _) in answers.items())


def _tests(part: str, results: dict[str, Result]) -> Iterator[str]:
    del part
    counts = ("passed", "failed", "skipped")
    yield from _table(
        ["file", *counts, "seconds"],
        (
            [name, *(str(result.found.get(count, "")) for count in counts), f"{result.seconds:.0f}"]
            for name, result in results.items()
            if result.status in ("done", "missed")
        ),
    )


def _parity(part: str, results: dict[str, Result]) -> Iterator[str]:
    del part
    yield "Largest relative difference from the plain PyTorch loop over twenty steps; in brackets what it may be."
    yield ""
    yield from _table(
        ["case", "loss", "gradient norm", "weights", "result"],
        (
            [
                name,
                *(
                    f"{result.found[kind]:.1e} ({most:.0e})"
                    for kind, most in zip(("loss", "norm", "weights"), result.found["tolerance"], strict=True)
                ),
                "agrees" if result.status == "done" else "DIFFERS",
            ]
            for name, result in results.items()
            if result.status in ("done", "missed") and "tolerance" in result.found
        ),
    )


def _resume(part: str, results: dict[str, Result]) -> Iterator[str]:
    del part
    told: dict[str, Callable[[dict[str, Any]], str]] = {
        "stopped": lambda found: f"the same bits at {found['step']}",
        "killed": lambda found: f"killed after step {found['killed_after_step']}, the same bits at {found['step']}",
        "out of memory, cut": lambda found: f"micro_batch_size: auto found {found['micro_batch_size']}",
        "out of memory, told": lambda found: found["message"].partition(";")[0],
        "hang": lambda found: f"reported after {found['seconds']:.0f} s ({found['way']}, {found['ranks']} rank(s))",
    }
    for name, result in results.items():
        if result.status == "done":
            yield f"- {name}: {next(tell(result.found) for start, tell in told.items() if name.startswith(start))}"


def _stages(part: str, results: dict[str, Result]) -> Iterator[str]:
    del part
    yield "Four steps of a tiny Llama. In fp32 the losses are those of the CPU; else it is shown that they are finite."
    yield ""
    yield from _table(
        ["way", "largest relative difference from the CPU", "last loss"],
        (
            [name, f"{found['difference']:.1e}" if "difference" in found else "", f"{found['losses'][-1]:.4f}"]
            for name, found in ((name, result.found) for name, result in results.items())
            if found.get("losses")
        ),
    )


def _plan(part: str, results: dict[str, Result]) -> Iterator[str]:
    del part
    yield "Planned there before each run: calibrated, by its measured speeds; catalogue, as of a device elsewhere."
    yield ""
    runs = {name: result.found for name, result in results.items() if "plans" in result.found}
    yield from _table(
        ["run", "memory planned, GiB", "allocated", "error", "reserved", *_PLAN_TIMES],
        (planned_row(name, found, ("calibrated", "catalogue")) for name, found in runs.items()),
    )


_PLAN_TIMES = ("step calibrated, ms", "step catalogue", "measured", "errors")


def planned_row(name: str, found: dict[str, Any], origins: Sequence[str]) -> list[str]:
    """Returns a row of planned and measured memory and time of a run: `found` of bench/gpu/planned.py."""
    plans = [found["plans"].get(origin, {}) for origin in origins]
    memory, took = plans[-1].get("allocated"), found["seconds"]
    seconds = [plan.get("seconds") for plan in plans]
    return [
        name,
        plans[-1].get("failed", "no plan") if memory is None else f"{memory / 2**30:.2f}",
        f"{found['peak_bytes'] / 2**30:.2f}",
        "" if memory is None else f"{memory / found['peak_bytes'] - 1:+.1%}",
        f"{found.get('reserved_bytes', found['peak_bytes']) / 2**30:.2f}",
        *("" if each is None else f"{1000 * each:.1f}" for each in seconds),
        f"{1000 * took:.1f}",
        ", ".join(f"{each / took - 1:+.0%}" for each in seconds if each is not None),
    ]


def _head(part: str, results: dict[str, Result]) -> Iterator[str]:
    del part
    yield "Head and loss alone, forward and backward in bf16; memory beyond their inputs."
    yield ""
    yield from _table(
        ["rows x width, tokens", "way", "ms", "over all logits", "GiB", "difference"],
        (
            [
                name,
                way,
                f"{1000 * found['seconds']:.1f}",
                f"{found['seconds'] / result.found['ways']['all logits']['seconds']:.2f}",
                f"{found['bytes'] / 2**30:.2f}",
                f"{found['difference']:.1e}",
            ]
            for name, result in results.items()
            if result.status == "done"
            for way, found in result.found["ways"].items()
        ),
    )


def _generate(part: str, results: dict[str, Result]) -> Iterator[str]:
    del part
    found = {name: result.found for name, result in results.items() if "rates" in result.found}
    yield from _table(
        ["case", "engine, tokens/s", "generate", "ratio", "first token, ms", "generate's", "same answers"],
        (
            [
                name,
                *(f"{rate:,.0f}" for rate in each["rates"]),
                f"{each['ratios'][1]:.2f}",
                *(f"{1000 * seconds:.0f}" for seconds in each["first_tokens"]),
                "{} of {}".format(*each["same"]),
            ]
            for name, each in found.items()
        ),
    )


def _not_done(results: dict[str, Result]) -> Iterator[str]:
    left = {name: result for name, result in results.items() if result.status != "done"}
    if left:
        yield ""
    for name, result in left.items():
        yield f"- {name}: {result.status}: {result.why}"


# --- benches ---------------------------------------------------------------------------------------------------------


def _bench(part: str, results: dict[str, Result], with_goals: bool) -> Iterator[str]:
    settings: dict[str, Sides] = {}
    shares = with_goals and part == "bench-pretrain"
    for name, result in results.items():
        if result.status == "done" and name.count(" | ") == 2:
            setting, side, _ = name.split(" | ")
            settings.setdefault(setting, {}).setdefault(side, []).append(result.found)
    for setting, sides in settings.items():
        unit = next(iter(sides.values()))[0]["unit"]
        yield f"### {setting}"
        yield ""
        if part == "bench-pretrain" and setting.startswith("8B"):
            yield from (CONTEXT, "")
        yield from _table(
            ["side", "rounds", f"{unit}/s", "share of peak", "goal", "peak memory, GiB", "last loss"],
            (_side_row(SHARES.get((setting, side)) if shares else None, side, found) for side, found in sides.items()),
        )
        ratios = list(_ratio_rows(part, sides)) if with_goals else []
        if ratios:
            yield ""
            yield from _table(["ours over theirs", "speed", "at least", "memory", "at most"], ratios)
        yield ""


def _side_row(goal: float | None, side: str, found: list[dict[str, Any]]) -> list[str]:
    """goal: the share of the device's peak that the side is to reach, where it has one."""
    share = None if found[0]["mfu"] is None else _median(found, "mfu")
    return [
        side,
        str(len(found)),
        f"{_median(found, 'rate'):,.0f}",
        "" if share is None else f"{share:.1%}",
        "" if goal is None or share is None else f"{goal:.0%} {reached(share >= goal)}",
        f"{_median(found, 'peak_bytes') / 2**30:.2f}",
        f"{_median(found, 'loss'):.3f}" if "loss" in found[0] else "",
    ]


def _ratio_rows(part: str, sides: Sides) -> Iterator[list[str]]:
    for ours, theirs, least, most in RATIOS[part]:
        if ours not in sides or theirs not in sides:
            continue
        speed = _median(sides[ours], "rate") / _median(sides[theirs], "rate")
        memory = _median(sides[ours], "peak_bytes") / max(1, _median(sides[theirs], "peak_bytes"))
        within = "" if most is None else f"{most} {reached(memory <= most)}"
        row = [f"{ours} over {theirs}", f"{speed:.2f}", f"{least} {reached(speed >= least)}"]
        yield [*row, f"{memory:.2f}", within]


def reached(yes: bool) -> str:
    return "reached" if yes else "MISSED"


def _median(found: list[dict[str, Any]], key: str) -> float:
    return statistics.median(each[key] for each in found)


def _table(head: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        return
    from bench.tables import markdown_table

    yield markdown_table(head, listed)


def _section(part: str, results: dict[str, Result], with_goals: bool) -> Iterator[str]:
    """with_goals: False in a rehearsal, whose ratios say nothing."""
    if part in _SECTIONS:
        return _SECTIONS[part](part, results)
    return _bench(part, results, with_goals)


_SECTIONS = {
    "doctor": _doctor,
    "tests": _tests,
    "parity": _parity,
    "stages": _stages,
    "resume": _resume,
    "plan": _plan,
    "generate": _generate,
    "bench-head": _head,
}
