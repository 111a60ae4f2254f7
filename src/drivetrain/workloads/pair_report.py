"""Reports on pairs of answers before training: their lengths, and what is trained on, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from drivetrain.data.language.chat import show
from drivetrain.data.language.samples import Pair, PairSamples, Sample


def sides_report(parts: Sequence[PairSamples], evaluation: Sequence[PairSamples]) -> dict[str, Any]:
    """Returns lengths of the answers in tokens, and the share of pairs whose chosen one is longer: where that is far
    from a half, length alone tells the sides apart, and is learned."""
    counts = np.array([[_targets(side) for side in pair.sides] for pair in _pairs(parts)])
    equal = (counts[:, 0] == counts[:, 1]).mean()
    seen = {_digest(prompt(pair)) for pair in _pairs(parts)}
    return {
        "chosen tokens": round(float(counts[:, 0].mean()), 1),
        "rejected tokens": round(float(counts[:, 1].mean()), 1),
        "chosen longer": round(float((counts[:, 0] > counts[:, 1]).mean()), 4),
        "equally long": round(float(equal), 4),
        "evaluation prompts trained on": sum(_digest(prompt(pair)) in seen for pair in _pairs(evaluation)),
    }


def prompt(pair: Pair) -> np.ndarray:
    """Returns the tokens before the first target of the chosen side."""
    ids, targets = pair.chosen
    return ids[: int(np.argmax(targets))]


def pair_of(part: PairSamples, tokenizer: Any) -> dict[str, Any]:
    """Returns the first pair: the pieces of the prompt, and of each answer from its first target on."""
    pair = part.load(0, 0)
    start = len(prompt(pair))
    before = [{"text": text, "trained": False} for text, _ in show(*_from(pair.chosen, 0, start), tokenizer)]
    found: dict[str, Any] = {"from": part.name(0), "prompt": before}
    for name, side in zip(("chosen", "rejected"), pair.sides, strict=True):
        pieces = show(*_from(side, start, len(side[0])), tokenizer)
        found[name] = {
            "tokens": len(side[0]),
            "target tokens": _targets(side),
            "pieces": [{"text": text, "trained": trained} for text, trained in pieces],
        }
    return found


def _from(side: Sample, start: int, end: int) -> Sample:
    return side[0][start:end], side[1][start:end]


def _targets(side: Sample) -> int:
    return int(side[1][1:].sum())


def _pairs(parts: Sequence[PairSamples]) -> Iterator[Pair]:
    return (part.load(index, 0) for part in parts for index in range(len(part)))


def _digest(ids: np.ndarray) -> bytes:
    return blake2b(ids.tobytes(), digest_size=16).digest()
