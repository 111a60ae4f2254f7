"""Tables of what is in a run's data."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from drivetrain.runtime.strict_json import dumps
from drivetrain.tracking.quantities import size_text
from drivetrain.workloads.class_samples import CLASS_SAMPLES
from drivetrain.workloads.classification import CLASS_COUNTS, LARGEST_CLASS

BAR = 40  # characters of the longest one
MOST_CLASSES = 50
OPEN, CLOSE = "⟦", "⟧"
REFUSED = "refused by train"
SAMPLES = "samples"
HIDDEN = (REFUSED, SAMPLES, CLASS_COUNTS, CLASS_SAMPLES, LARGEST_CLASS)  # of the facts, what has a place of its own
Report = Mapping[str, Any]


def show(report: Report, console: Console, as_json: bool = False) -> None:
    """Prints the report. Without a terminal nothing is cut or wrapped to 80 columns or more. as_json: prints all of it
    as JSON."""
    if as_json:
        print(dumps(dict(report), indent=2))
        return
    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="backslashreplace")  # data hold what not every terminal can show
    if "sets" in report:
        for part in (_sets, _reasons, _mixture, _totals, _sides, _lengths, _padding, _sample):
            part(report, console)
    else:
        _classes(report, console)
        left = {name: value for name, value in report.items() if name not in HIDDEN}
        console.print(_facts(_in_units(left)))
        if SAMPLES not in report:  # else the samples that were asked for are enough
            _class_samples(report, console)
    for each in report.get(SAMPLES, []):
        _previewed(each, console)
    if report.get(REFUSED):
        console.print()
    for line in report.get(REFUSED, []):
        _say(console, f"[bold yellow]train would refuse this:[/] {escape(line)}")


def _classes(report: Report, console: Console) -> None:
    """Prints one row a class: its samples and their share, in training and in evaluation data."""
    counts = report.get(CLASS_COUNTS)
    if not counts:
        return
    table = Table(Column("class", overflow="fold"), box=None, pad_edge=False)
    totals = {part: max(1, sum(each[part] for each in counts)) for part in ("training", "evaluation")}
    for part in totals:
        table.add_column(part, justify="right")
        table.add_column("share", justify="right")
    for each in counts[:MOST_CLASSES]:
        cells = ((f"{each[part]:,}", f"{each[part] / total:.1%}") for part, total in totals.items())
        table.add_row(escape(_visible(each["class"])), *(cell for pair in cells for cell in pair))
    console.print(table)
    if len(counts) > MOST_CLASSES:
        console.print(f"and {len(counts) - MOST_CLASSES:,} classes more (--json has all)")
    console.print()


def _class_samples(report: Report, console: Console) -> None:
    """Prints the first texts of each class."""
    for each in report.get(CLASS_SAMPLES, []):
        if each["texts"]:
            _say(console, f"\n[bold]first texts of {escape(_visible(each['class']))}[/]")
        for text in each["texts"]:
            console.print(Text(_visible(text)), soft_wrap=not console.is_terminal)


def _in_units(facts: Report) -> dict[str, Any]:
    """Returns shares as percentages, lengths with their unit."""
    written = dict(facts)
    if "truncated" in written:
        written["truncated"] = f"{written['truncated']:.1%} of the training texts"
    if "mean_tokens" in written:
        written["mean_tokens"] = f"{written['mean_tokens']:,} a text"
    if "decoded_images_bytes" in written:
        written["decoded_images"] = f"{size_text(written.pop('decoded_images_bytes'))} of memory"
    return written


def _say(console: Console, markup: str) -> None:
    console.print(markup, soft_wrap=not console.is_terminal)


def _facts(facts: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        listed = isinstance(value, list | tuple)
        table.add_row(name.replace("_", " "), escape(", ".join(map(str, value)) if listed else _number(value)))
    return table


def _sets(report: Report, console: Console) -> None:
    """Prints one row a data set; evaluation sets are marked."""
    titles = ("rows", "un-\nusable", "samples", "held\nout", "truncated", "too\nlong", "without\ntarget")
    table = Table(Column("data set", overflow="fold"), box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for each in report["sets"]:
        name = each["name"] + (" (evaluation)" if each["for"] == "evaluation" else "")
        counts = [each[key] for key in ("rows", "unusable rows", "samples", "held out")]
        rest = [each[key] for key in ("too long", "without target")]
        truncated = f"{each['truncated']:,} ({each['truncated share']:.0%})" if each["truncated"] else "0"
        table.add_row(escape(name), *map(_number, counts), truncated, *map(_number, rest))
    console.print(table)
    for each in report["sets"]:
        if "drawn rows" in each:
            _say(console, f"of {escape(each['name'])} at most {each['drawn rows']:,} rows are used, drawn at random")
        if "pairs" in each:
            _say(
                console,
                f"{each['answered rows']:,} rows of several answers in {escape(each['name'])} make "
                f"{each['pairs']:,} pairs",
            )
    if report["stream"]:
        looked_at = f"the first {report['looked at']:,} rows of each data set"
        _say(console, f"a stream: all figures but those of rows and samples are of {looked_at}")


def _reasons(report: Report, console: Console) -> None:
    for each in report["sets"]:
        if not each["unusable rows"]:
            continue
        console.print(f"\nunusable in {escape(each['name'])}:")
        for reason in each["reasons"]:
            _say(console, f"  {escape(_visible(reason))}")
        more = each["unusable rows"] - len(each["reasons"])
        if more:
            console.print(f"  and {more:,} more; of all:")
            for reason in each["by reason"]:
                _say(console, f"  {escape(_visible(reason))}")


def _mixture(report: Report, console: Console) -> None:
    sets = [each for each in report["sets"] if "an epoch" in each]
    if not sets:
        return
    total = sum(each["an epoch"] for each in sets)
    table = Table(Column("mixture", overflow="fold"), box=None, pad_edge=False)
    for title in ("weight", "share", "samples an epoch", "times through it"):
        table.add_column(title, justify="right")
    for each in sets:
        times = each["an epoch"] / each["samples"] if each["samples"] else 0.0
        share = f"{each['an epoch'] / total:.1%}"
        stages = each.get("weights by step", {}).items()
        later = [f"from step {step} {weight:g}" for step, weight in stages if step != "0"]
        weights = "\n".join([f"{each['weight']:g}", *later])
        table.add_row(escape(each["name"]), weights, share, _number(each["an epoch"]), f"{times:.2f}")
    console.print()
    console.print(table)


def _totals(report: Report, console: Console) -> None:
    if "training samples" not in report:
        return
    rows: dict[str, str] = {
        "training samples": _number(report["training samples"]),
        "evaluation samples": _number(report["evaluation samples"]),
    }
    if "tokens" in report:
        share = report["target tokens"] / report["tokens"]
        targets = f"of which {report['target tokens']:,} are targets ({share:.0%})"
        answered = "reference" in (report.get("sample") or {})
        rows["tokens"] = f"{report['tokens']:,}, {'all of prompts' if answered else targets}"
    rows["vocabulary"] = _number(report["vocabulary"])
    if "template" in report:
        rows["template"] = report["template"]
    if "labels" in report:
        labels = report["labels"]
        rows["labels"] = f"{labels['desirable']:,} desirable, {labels['undesirable']:,} undesirable"
    if "steps" in report:
        steps = report["steps"]
        rows["steps"] = f"{steps['steps']:,}, of which {steps['right']:,} are marked as right"
    if "duplicates" in report:
        rows["duplicates"] = f"{report['duplicates']:,} of the training samples, each like an earlier one"
        if report["evaluation samples trained on"]:
            rows["also trained on"] = f"{report['evaluation samples trained on']:,} of the evaluation samples"
    console.print()
    console.print(_facts(rows))


def _sides(report: Report, console: Console) -> None:
    """Prints how the answers of pairs compare."""
    found = report.get("pairs")
    if found is None:
        return
    alike = sum(each["alike"] for each in report["sets"])
    rows = {
        "answers": f"chosen {found['chosen tokens']:,} tokens, rejected {found['rejected tokens']:,} (means)",
        "chosen is longer": f"in {found['chosen longer']:.0%} of the pairs; as long in {found['equally long']:.0%}",
        "alike": f"{alike:,} pairs are left out, whose sides do not differ within the length",
    }
    if found["evaluation prompts trained on"]:
        rows["also trained on"] = f"the prompts of {found['evaluation prompts trained on']:,} evaluation samples"
    console.print()
    console.print(_facts(rows))


def _lengths(report: Report, console: Console) -> None:
    found = report.get("lengths")
    if found is None:
        return
    low, middle, high = found["percentiles 5, 50, 95"]
    most = max(each["samples"] for each in found["bins"])
    block = "#" if console.options.ascii_only else "█"
    table = Table(Column("tokens", justify="right"), "", Column("samples", justify="right"), box=None, pad_edge=False)
    for each in found["bins"]:
        bar = block * -(-each["samples"] * BAR // most)
        lengths = _number(each["to"]) if each["from"] == each["to"] else f"{each['from']:,} to {each['to']:,}"
        table.add_row(lengths, bar, _number(each["samples"]))
    console.print()
    console.print(table)
    line = f"mean {found['mean']:,}; 5 % have at most {low:,}, half {middle:,}, 95 % {high:,}; the longest has "
    _say(console, f"{line}{found['longest']:,} of the {report['length']:,} allowed")


def _padding(report: Report, console: Console) -> None:
    found = report.get("padding")
    if found is None:
        return
    rows = {
        f"the length ({report['length']:,})": "the length",
        "a batch's longest, of 32 random ones": "the batch's longest",
    }
    table = Table("padded to", Column("is padding", justify="right"), box=None, pad_edge=False)
    table.add_column("packing does as much in", justify="right")
    for shown, key in rows.items():
        less = 1 / found[f"packing gains over {key}"]
        table.add_row(shown, f"{found[f'padded to {key}']:.0%}", f"{less:.0%} of the positions")
    console.print()
    console.print(table)


def _sample(report: Report, console: Console) -> None:
    sample = report.get("sample")
    if sample is None:
        return
    if "chosen" in sample:
        _pair(sample, console)
        return
    if "reference" in sample:
        _prompt(sample, console)
        return
    trained_on = f"{sample['from']}: {sample['target tokens']:,} of its {sample['tokens']:,} tokens are trained on"
    which = "all but the first" if all(piece["trained"] for piece in sample["pieces"]) else f"those in {OPEN} {CLOSE}"
    _say(console, f"\n[bold]first sample[/] {escape(trained_on)}, {which}")
    console.print(_marked(sample["pieces"]), soft_wrap=not console.is_terminal)


def _prompt(sample: Report, console: Console) -> None:
    """Prints a prompt that the model will answer, and the reference of its answers."""
    answered = f"{sample['from']}: {sample['tokens']:,} tokens, which the model answers"
    _say(console, f"\n[bold]first prompt[/] {escape(answered)}")
    console.print(_marked(sample["pieces"]), soft_wrap=not console.is_terminal)
    if sample["reference"] is None:
        _say(console, "no reply in the data, with which rewards could compare answers")
        return
    _say(console, "[bold]reference[/], which rewards may compare answers with")
    console.print(escape(sample["reference"]), soft_wrap=not console.is_terminal)


def _pair(sample: Report, console: Console) -> None:
    """Prints the prompt, and both answers side by side; without a terminal one below the other."""
    _say(console, f"\n[bold]first pair[/] {escape(sample['from'])}, trained on are those in {OPEN} {CLOSE}")
    console.print(_marked(sample["prompt"]), soft_wrap=not console.is_terminal)
    titles = {
        name: f"{name}: {sample[name]['target tokens']:,} of {sample[name]['tokens']:,} tokens are trained on"
        for name in ("chosen", "rejected")
    }
    if console.is_terminal:
        table = Table(*(Column(title, overflow="fold", ratio=1) for title in titles.values()), expand=True)
        table.add_row(*(_marked(sample[name]["pieces"]) for name in titles))
        console.print(table)
        return
    for name, title in titles.items():
        _say(console, f"\n[bold]{title}[/]")
        console.print(_marked(sample[name]["pieces"]), soft_wrap=True)


def _previewed(sample: Report, console: Console) -> None:
    """Prints a sample: its label, and its text or, of a picture, that there is one."""
    label = f": {sample['reference']}" if "reference" in sample else ""
    _say(console, f"\n[bold]sample {sample['number']:,}[/]{escape(_visible(label))}")
    for side in sample.get("sides", []):
        tokens = f"{side['name']}, {side['length']:,} tokens{', cut at the length' if side['at_length'] else ''}"
        _say(console, f"[dim]{escape(tokens)}[/]")
        console.print(_marked(side["segments"]), soft_wrap=not console.is_terminal)
    if "picture" in sample:
        _say(console, "a picture (--json has it)")
    if "text" in sample:
        console.print(Text(_visible(sample["text"])), soft_wrap=not console.is_terminal)


def _marked(pieces: Sequence[Report]) -> Text:
    text = Text()
    for piece in pieces:
        if piece["trained"]:
            text.append(OPEN, "bold green").append(_visible(piece["text"]), "green").append(CLOSE, "bold green")
        else:
            text.append(_visible(piece["text"]))
    return text


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _visible(text: str) -> str:
    """Returns the text with control characters written out: a sample must not steer the terminal, nor hide a carriage
    return."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
