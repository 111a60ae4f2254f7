"""Adds up spans: by part of a step, by operator, by module, and how far exchanges are hidden behind computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from drivetrain.profile.spans import COLLECTIVES, MODULE, PART, Span, common, length, union

NO_MODULE = "(outside of modules)"


def breakdown(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Returns the seconds a step of one rank.

    step: from the first span to the last. parts: the loop's own. computing: operators, or a GPU's kernels where there
    are any. exchange: between ranks; exposed_exchange: while nothing is computed. idle: the rest, in which the
    processor runs Python, and a GPU waits for it. recompute: operators of the forward pass that run again within the
    backward pass.
    operators, modules: {"name", "seconds", ...} by falling time. on_gpu: whether a GPU computes.
    """
    own = (span for span in spans if span.device and not span.is_annotation)
    kernels = [span for span in own if not span.is_exchange and not span.is_named]
    work = kernels or [span for span in spans if span.is_operator]
    computing = union((s.start, s.end) for s in work)
    exchange = union((s.start, s.end) for s in spans if s.is_exchange)
    hidden = length(common(computing, exchange))
    wall = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    per_step = 1 / max(1, steps)
    return {
        "step": wall * per_step,
        "on_gpu": bool(kernels),
        "parts": {name: seconds * per_step for name, seconds in _parts(spans).items()},
        "computing": length(computing) * per_step,
        "exchange": length(exchange) * per_step,
        "exposed_exchange": (length(exchange) - hidden) * per_step,
        "idle": max(0.0, wall - length(union([*computing, *exchange]))) * per_step,
        "recompute": sum(s.own_seconds for s in spans if not s.device and _is_recomputed(s)) * per_step,
        "operators": _operators(work, per_step),
        "modules": _modules(spans, per_step),
    }


def _parts(spans: Iterable[Span]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.name.startswith(PART) and not span.device:
            found[span.name.removeprefix(PART)] += span.end - span.start
    return dict(found)  # in the order in which they come in a step


def _operators(work: Iterable[Span], per_step: float) -> list[dict[str, Any]]:
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for span in work:
        seconds[span.name] += span.own_seconds
        calls[span.name] += 1
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return [
        {"name": name, "seconds": seconds[name] * per_step, "calls": calls[name] * per_step}
        for name in ordered
        if seconds[name] > 0
    ]


def _modules(spans: Sequence[Span], per_step: float) -> list[dict[str, Any]]:
    """Returns the seconds of operators by the module that called them, forward and backward, alike blocks together.

    An operator of the backward pass belongs to the module of the forward operator that has its sequence number: the
    last one of that number, since earlier ones of the same number made no node of the graph.
    """
    owners: dict[int, str] = {}
    for span in spans:
        if span.sequence >= 0 and not span.is_backward and not _within_backward(span):
            owner = _module_of(span)
            if owner is not None:
                owners[span.sequence] = owner
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.device or span.is_named or span.is_async or span.is_exchange or span.name.startswith(COLLECTIVES):
            continue  # the seconds of an exchange are no module's
        node = span if span.is_backward else next((each for each in span.within() if each.is_backward), None)
        if node is not None:
            backward[_module_of(span) or owners.get(node.sequence, NO_MODULE)] += span.own_seconds
        else:
            forward[_module_of(span) or NO_MODULE] += span.own_seconds
    names = sorted({*forward, *backward}, key=lambda name: -(forward[name] + backward[name]))
    return [
        {
            "name": name,
            "seconds": (forward[name] + backward[name]) * per_step,
            "forward": forward[name] * per_step,
            "backward": backward[name] * per_step,
        }
        for name in names
    ]


def _module_of(span: Span) -> str | None:
    named = next((each.name for each in span.within() if each.name.startswith(MODULE)), None)
    return None if named is None else named.removeprefix(MODULE)


def _within_backward(span: Span) -> bool:
    return any(each.is_backward for each in span.within())


def _is_recomputed(span: Span) -> bool:
    return not span.is_backward and not span.is_named and _module_of(span) is not None and _within_backward(span)
