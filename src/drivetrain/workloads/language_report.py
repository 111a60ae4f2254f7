"""What is known of a language model's data before training: rows, losses on the way, lengths, padding, one sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from drivetrain.config.language import LanguageModel
from drivetrain.data.language.chat import show
from drivetrain.data.language.samples import JoinedSamples, TokenSamples
from drivetrain.workloads.language_data import Account, LanguageReader

SHOWN = 5
BINS = 10
BATCH = 32  # samples, over which padding is reckoned


def data_report(
    config: LanguageModel, reader: LanguageReader, train: JoinedSamples, evaluation: JoinedSamples | None
) -> dict[str, Any]:
    """JSON-able. Lengths are of training samples, in tokens; of a stream they are not known."""
    found: dict[str, Any] = {
        "stage": config.stage,
        "sets": [_account(account) for account in reader.accounts],
        "training samples": len(train),
        "evaluation samples": 0 if evaluation is None else len(evaluation),
        "vocabulary": len(reader.tokenizer),
    }
    if reader.template is not None:
        found["template"] = reader.template.name
    known = [part for part in train.parts if isinstance(part, TokenSamples)]
    if known and len(known) == len(train.parts):
        lengths = np.concatenate([part.lengths for part in known])
        found["tokens"] = int(lengths.sum())
        found["target tokens"] = sum(int(part.targets.sum()) for part in known)
        found["lengths"] = _histogram(lengths, config.data.length)
        found["padding"] = _padding(lengths, config.data.length)
        found["duplicates"] = _duplicates(known)
    ids, targets = train.load(0, 0)
    # the first token is no target: nothing comes before it
    pieces = show(ids, targets & (np.arange(len(ids)) > 0), reader.tokenizer)
    found["sample"] = [{"text": text, "trained": trained} for text, trained in pieces]
    return found


def _account(account: Account) -> dict[str, Any]:
    made = account.samples + account.held_out
    return {
        "name": account.name,
        "for": "evaluation" if account.for_evaluation else "training",
        "rows": account.rows,
        "samples": account.samples,
        "held out": account.held_out,
        "unusable rows": len(account.bad),
        "reasons": [f"{bad.where}: {bad.why}" for bad in account.bad[:SHOWN]],
        "truncated": account.truncated,
        "truncated share": round(account.truncated / made, 4) if made else 0.0,
        "too long": account.too_long,
        "without target": account.without_target,
    }


def _histogram(lengths: np.ndarray, longest: int) -> dict[str, Any]:
    counts, edges = np.histogram(lengths, bins=BINS, range=(0, longest))
    low, middle, high = np.percentile(lengths, [5, 50, 95])
    return {
        "mean": round(float(lengths.mean()), 1),
        "percentiles 5, 50, 95": [round(float(value)) for value in (low, middle, high)],
        "bins": [
            {"from": round(float(start)), "to": round(float(end)), "samples": int(count)}
            for start, end, count in zip(edges, edges[1:], counts, strict=False)
        ],
    }


def _padding(lengths: np.ndarray, longest: int) -> dict[str, float]:
    """Share of positions that hold no token, in batches of 32 random samples, and tokens a position against each way
    when nothing is padded."""
    order = np.random.default_rng(0).permutation(len(lengths))
    batches = np.split(lengths[order], range(BATCH, len(order), BATCH))
    dynamic = sum(len(batch) * int(batch.max()) for batch in batches)
    total = int(lengths.sum())
    return {
        "padded to the length": round(1 - total / (len(lengths) * longest), 4),
        "padded to the batch's longest": round(1 - total / dynamic, 4),
        "packing gains over the length": round(len(lengths) * longest / total, 2),
        "packing gains over the batch's longest": round(dynamic / total, 2),
    }


def _duplicates(parts: Sequence[TokenSamples]) -> int:
    """Training samples that say the same as an earlier one."""
    contents = chain.from_iterable((part.load(i, 0)[0].tobytes() for i in range(len(part))) for part in parts)
    return sum(map(len, parts)) - len(set(contents))
