"""Turns traces into a verdict for each promise.

How far two computations of the same steps may differ is not one number for every model: rounding grows from step to
step, and quickly at a high learning rate. So a third trace, of one process with the batch cut in another way, shows the
effect of rounding alone on this run; the engine may differ ten times as far, or 1e-5 (16-bit: 1e-2), whichever is more.
A loss that depends on the cut more than rounding explains is wrong itself, and fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.config.precision import Precision
from drivetrain.config.run import RunConfig
from drivetrain.prove.trace import Trace

LEAST = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}  # by what computes
OVER_ROUNDING = 10.0
# by how much the first step's loss may depend on how the batch is cut: weights are the same, so only by rounding
MOST_BY_CUTTING = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 1e-1}


@dataclass(frozen=True)
class Verdict:
    promise: str
    holds: bool | None  # None: there is nothing to say
    why: str


def verdicts(run: RunConfig, asked: Trace, reference: Trace, rounding: Trace) -> list[Verdict]:
    """Returns a verdict for each promise. asked: trace of the run's engine; reference: of one process; rounding: of one
    process with another cut."""
    return [
        _same_curve(run.precision_spec, asked, reference, rounding),
        _engaged(run, asked),
        _each_sample_once(asked, reference),
        _evaluation(run.precision_spec, asked, reference),
        _exact_resume(asked),
    ]


def remarks(reference: Trace, steps: int) -> list[str]:
    """Returns remarks on what was switched off, and what that means for the real run. steps: as many as were to be
    compared."""
    found = []
    if len(reference.losses) < steps:
        found.append(f"the run has {len(reference.losses)} steps, and so many were compared")
    if reference.makes_samples:
        found.append(
            "the model wrote no answers, since rounding alone can change one: steps learned from stand-ins for them"
        )
    if reference.dropouts:
        found.append(
            f"dropout ({reference.dropouts} modules) was switched off: each rank draws masks of its own, so in the "
            "real run curves agree on average only"
        )
    if reference.batch_norms:
        found.append(
            f"BatchNorm ({reference.batch_norms} modules) was kept fixed: its statistics are of each rank's and "
            "micro-batch's samples, so in the real run they depend on the number of devices. GroupNorm's do not"
        )
    return found


def _same_curve(precision: Precision, asked: Trace, reference: Trace, rounding: Trace) -> Verdict:
    least = LEAST[precision.compute]
    by_cutting = _differences(rounding.losses[:1], reference.losses[:1])
    if by_cutting and not by_cutting[0] <= MOST_BY_CUTTING[precision.compute]:
        pair = f"{rounding.losses[0]:.7g} in place of {reference.losses[0]:.7g}"
        why = f"step 1: in one process with the batch cut in another way the loss is {pair}: it is no sum over samples"
        return Verdict("same curve", False, why)
    broken = next((step for step, loss in enumerate(reference.losses) if not math.isfinite(loss)), None)
    if broken is not None:
        why = f"step {broken + 1}: the loss is {reference.losses[broken]} in one process too, where training ends"
        return Verdict("same curve", False, why)
    worst, allowed_there = 0.0, least
    for name in ("losses", "norms"):
        theirs = getattr(reference, name)
        far = _differences(getattr(asked, name), theirs)
        natural = _differences(getattr(rounding, name), theirs)
        for step, difference in enumerate(far):
            allowed = max(least, OVER_ROUNDING * max(natural[: step + 1]))
            if not difference <= allowed:
                kind = "loss" if name == "losses" else "gradient norm"
                pair = f"{getattr(asked, name)[step]:.7g} against {theirs[step]:.7g}"
                where = _first_parameter(asked, reference, rounding, least)
                return Verdict("same curve", False, f"step {step + 1}: {kind} {pair} ({difference:.1e}){where}")
            if difference / allowed > worst / allowed_there:
                worst, allowed_there = difference, allowed
    where = _first_parameter(asked, reference, rounding, least)
    if where:
        return Verdict("same curve", False, where.removeprefix("; "))
    difference_text = f"loss and gradient norm differ by at most {worst:.1e} over {len(asked.losses)} steps"
    return Verdict("same curve", True, f"{difference_text}, where {allowed_there:.1e} is allowed")


def _first_parameter(asked: Trace, reference: Trace, rounding: Trace, least: float) -> str:
    """Returns the first step and parameter whose gradient differs by more than rounding explains."""
    for step, theirs in enumerate(reference.gradients):
        ours, other = asked.gradients[step], rounding.gradients[step]
        for name, (norm, projection) in theirs.items():
            if name not in ours:
                return f"; step {step + 1}: {name} has no gradient"
            scale = max(norm, 1e-3 * max(n for n, _ in theirs.values()), 1e-30)
            mine = max(abs(ours[name][0] - norm), abs(ours[name][1] - projection)) / scale
            natural = max(abs(other[name][0] - norm), abs(other[name][1] - projection)) / scale
            if not mine <= max(100 * least, OVER_ROUNDING * natural):
                return f"; the first parameter whose gradient differs is {name}, at step {step + 1} (by {mine:.1e})"
    return ""


def _engaged(run: RunConfig, asked: Trace) -> Verdict:
    ranks, first = asked.engaged, asked.engaged[0]
    held = sum(rank["local_parameters"] for rank in ranks)
    text = f"{first['wrapper']}, {len(ranks)} rank{'s' if len(ranks) > 1 else ''} of {run.world_size} asked for"
    each = ", ".join(f"{rank['local_parameters']:,}" for rank in ranks[:4]) + (", ..." if len(ranks) > 4 else "")
    text += f", each holding {each} of {first['global_parameters']:,} parameters"
    if first.get("emulated"):
        text += " (dp, CPU emulation)"
    return Verdict("engaged", len(ranks) == run.world_size and held >= first["global_parameters"], text)


def _each_sample_once(asked: Trace, reference: Trace) -> Verdict:
    for step, (batch, loaded) in enumerate(zip(asked.batches, asked.loaded, strict=True)):
        if batch != reference.batches[step]:
            return Verdict("each sample once", False, f"step {step + 1}: another global batch than one process takes")
        if sorted(batch) != sorted(loaded):
            twice = sorted({index for index in loaded if loaded.count(index) > 1})[:5]
            missing = sorted(set(batch) - set(loaded))[:5]
            return Verdict("each sample once", False, f"step {step + 1}: samples {twice} twice, {missing} not at all")
    total = sum(map(len, asked.loaded))
    return Verdict("each sample once", True, f"{total:,} samples loaded in {len(asked.loaded)} steps, none twice")


def _evaluation(precision: Precision, asked: Trace, reference: Trace) -> Verdict:
    if asked.evaluation is None or reference.evaluation is None:
        own = "evaluations judge answers of the model's own, which rounding alone can change: it was not compared"
        return Verdict("same evaluation", None, own if asked.judges_answers else "there are no evaluation data")
    allowed = LEAST[precision.compute]
    for name, theirs in reference.evaluation.items():
        ours = asked.evaluation[name]
        if not abs(ours - theirs) <= allowed * max(abs(theirs), 1e-3):
            return Verdict("same evaluation", False, f"{name} is {ours:.7g}, in one process {theirs:.7g}")
    shown = ", ".join(f"{name} {value:.4f}" for name, value in asked.evaluation.items())
    return Verdict("same evaluation", True, f"before training, on both: {shown}")


def _exact_resume(asked: Trace) -> Verdict:
    if asked.resumed is None:
        return Verdict("exact resume", None, "not tried")
    half, steps = len(asked.losses) // 2, len(asked.losses)
    if asked.resumed:
        return Verdict("exact resume", True, f"saved at step {half} and resumed: the same bits at step {steps}")
    why = f"saved at step {half} and resumed: other weights at step {steps}. On a GPU give deterministic=true"
    return Verdict("exact resume", False, why)


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Returns relative differences; infinite where either value is not finite."""
    return [
        abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) and math.isfinite(b) else math.inf
        for a, b in zip(ours, theirs, strict=True)
    ]
