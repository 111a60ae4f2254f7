"""Reports on a language model's data before training: rows, losses on the way, lengths, padding, one sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from drivetrain.config.language import LanguageModel
from drivetrain.config.preference import reads_margins
from drivetrain.data.bad_rows import by_reason
from drivetrain.data.language.chat import show
from drivetrain.data.language.samples import (
    JoinedSamples,
    LabelledSamples,
    PairSamples,
    PromptSamples,
    Sample,
    StepSamples,
    TextWindows,
    Tokenised,
    TokenSamples,
)
from drivetrain.data.language.sets import open_sets
from drivetrain.data.order import Order
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.errors import UserError
from drivetrain.workloads.language_account import Account
from drivetrain.workloads.language_data import EVALUATION, TRAIN, LanguageReader
from drivetrain.workloads.language_streams import LOOKED_AT, Stream
from drivetrain.workloads.pair_report import pair_of, sides_report

SHOWN = 5
BINS = 10
BATCH = 32  # samples, over which padding is reckoned


def data_report(
    config: LanguageModel,
    reader: LanguageReader,
    train: JoinedSamples | StreamedMixture,
    evaluation: JoinedSamples | None,
    order: Order,
) -> dict[str, Any]:
    """Returns the report, JSON-able. Lengths are of training samples, in tokens. For a stream, everything that needs
    tokens is of the first `looked at` rows of each data set. sample: None if none of those can be used."""
    found: dict[str, Any] = {"stage": config.stage, "stream": config.data.stream, "length": config.data.length}
    accounts, known, pairs = reader.accounts, _known(train), _pairs(train)
    if config.data.stream:
        found["looked at"] = LOOKED_AT
        accounts, known = _beginnings(config, reader)
    found["sets"] = _sets(config, accounts, order)
    found["training samples"] = len(train)
    found["evaluation samples"] = 0 if evaluation is None else len(evaluation)
    found["vocabulary"] = len(reader.tokenizer)
    if reader.template is not None:
        found["template"] = reader.template.name
    if known:
        lengths = np.concatenate([part.lengths for part in known])
        found["tokens"] = int(lengths.sum())
        found["target tokens"] = sum(_target_tokens(part) for part in known)
        found["lengths"] = _histogram(lengths)
        found["padding"] = _padding(lengths, config.data.length)
        if not pairs:
            found["duplicates"], found["evaluation samples trained on"] = _repeated(known, _known(evaluation))
    if config.samples == "labelled":
        found["labels"] = _labels(train)
    if config.samples == "steps":
        found["steps"] = _steps(train)
    if pairs:
        found["pairs"] = sides_report(pairs, _pairs(evaluation))
        found["duplicates"], found["evaluation samples trained on"] = _repeated(pairs, _pairs(evaluation))
        return {**found, "sample": pair_of(pairs[0], reader.tokenizer)}
    parts = train.parts if isinstance(train, JoinedSamples) else ()
    windows = [part for part in parts if isinstance(part, TextWindows) and len(part)]
    if windows:
        found["tokens"] = sum(_text_tokens(part, config.data.length) for part in windows)
        found["target tokens"] = found["tokens"] - len(windows)
    first: list[Tokenised] = [*known, *windows]
    found["sample"] = _sample(reader, first[0]) if first else None
    prompts = [part for part in parts if isinstance(part, PromptSamples) and len(part)]
    if prompts:
        found["sample"]["reference"] = prompts[0].rows[0].reference
    return found


def accounts_without_samples(config: LanguageModel, seed: int) -> dict[str, Any] | None:
    """Returns the report of data sets of which no sample is left; None if another problem keeps them from being
    read."""
    reader = LanguageReader(config, seed)
    with suppress(UserError):
        reader.read()
    described = _sets(config, reader.accounts, None)
    empty = [each for each in described if not each["samples"]]
    complete = len(described) == len([*config.data.train, *(config.data.evaluation or [])])
    lost = [each["unusable rows"] == each["rows"] or each["too long"] or each["without target"] for each in empty]
    if complete and empty and (not config.has_conversations or all(lost)):  # else a template has failed on the way
        return {"stage": config.stage, "stream": False, "sets": described}
    return None


# --- data sets -------------------------------------------------------------------------------------------------------


def _sets(config: LanguageModel, accounts: Sequence[Account], order: Order | None) -> list[dict[str, Any]]:
    """Returns the data sets, with the share that a mixture takes of each in an epoch."""
    described = [_account(account, config.data.stream) for account in accounts]
    for each, source in zip(described, config.data.train, strict=False):
        if source.samples is not None:
            each["drawn rows"] = source.samples
    counts = [] if order is None else order.drawn_before(int(order.steps_per_epoch))
    for each, source, count in zip(described, config.data.train, counts, strict=False):
        weight = source.weight if source.weight is not None else 1.0
        each |= {"weight": weight if not isinstance(weight, dict) else weight[0], "an epoch": count}
        if isinstance(weight, dict):
            each["weights by step"] = {str(step): value for step, value in sorted(weight.items())}
    return described


def _account(account: Account, stream: bool) -> dict[str, Any]:
    made = min(account.rows or 0, LOOKED_AT) - len(account.bad) if stream else account.samples + account.held_out
    return {
        "name": account.name,
        "for": "evaluation" if account.for_evaluation else "training",
        "rows": account.rows,
        "samples": account.samples,
        "held out": account.held_out,
        "unusable rows": len(account.bad),
        "reasons": [f"{bad.where}: {bad.why}" for bad in account.bad[:SHOWN]],
        "by reason": by_reason(account.bad),
        "truncated": account.truncated,
        "truncated share": round(account.truncated / made, 4) if made else 0.0,
        "too long": account.too_long,
        "without target": account.without_target,
        "alike": account.alike,
        **({} if account.paired is None else dict(zip(("answered rows", "pairs"), account.paired, strict=True))),
    }


# --- the first rows of a stream --------------------------------------------------------------------------------------


def _beginnings(config: LanguageModel, reader: LanguageReader) -> tuple[list[Account], list[TokenSamples]]:
    """Reads the first rows again, because a stream forgets why it leaves out a row. Samples: the training data's
    alone."""
    data, accounts, known = config.data, [], []
    for sources, field in ((data.train, TRAIN), (data.evaluation or [], EVALUATION)):
        for opened in open_sets(sources, data, config.samples, field, margins=reads_margins(config.stage)):
            account, samples = _beginning(Stream(opened, reader.tokenizer, reader.template, data, field))
            accounts.append(account)
            if field == TRAIN and len(samples):
                known.append(samples)
    return accounts, known


def _beginning(stream: Stream) -> tuple[Account, TokenSamples]:
    evaluates = stream.field == EVALUATION
    used = stream.evaluation() if evaluates else stream.training(0, 0)
    account = Account(stream.opened.name, len(stream.rows), samples=len(used), for_evaluation=evaluates)
    account.held_out = stream.held_out
    texts, found, account.bad = stream.beginning()
    if stream.template is None:
        samples = _in_memory(
            [(stream.sample({stream.opened.text_column: each.content}, each.where), each.where) for each in texts]
        )
        end = stream.tokenizer.eos_token_id
        last = samples.ids[samples.starts + samples.lengths - 1]
        account.truncated = int(((samples.lengths == stream.data.length) & ((end is None) | (last != end))).sum())
        return account, samples
    cut = stream.cut(found)
    account.bad = [*account.bad, *cut.bad]
    account.truncated, account.too_long, account.without_target = cut.truncated, cut.too_long, cut.without_target
    return account, cut.samples


def _in_memory(loaded: Sequence[tuple[Sample, str]]) -> TokenSamples:
    lengths = np.array([len(ids) for (ids, _), _ in loaded], np.int64)
    return TokenSamples(
        np.concatenate([np.zeros(0, np.int32), *(ids for (ids, _), _ in loaded)]),
        np.concatenate([np.zeros(0, bool), *(targets for (_, targets), _ in loaded)]),
        np.cumsum(lengths) - lengths,
        lengths,
        [where for _, where in loaded],
    )


# --- tokens ----------------------------------------------------------------------------------------------------------


def _known(samples: JoinedSamples | StreamedMixture | None) -> list[TokenSamples]:
    """Returns the parts whose tokens are in memory; of pairs both sides."""
    parts = samples.parts if isinstance(samples, JoinedSamples) else []
    parts = [part.own if isinstance(part, LabelledSamples | StepSamples) else part for part in parts]
    parts = [part.prompts if isinstance(part, PromptSamples) else part for part in parts]
    sides = [side for part in _pairs(samples) for side in (part.chosen, part.rejected)]
    return [part for part in parts if isinstance(part, TokenSamples) and len(part)] + sides


def _pairs(samples: JoinedSamples | StreamedMixture | None) -> list[PairSamples]:
    parts = samples.parts if isinstance(samples, JoinedSamples) else []
    return [part for part in parts if isinstance(part, PairSamples) and len(part)]


def _labels(samples: JoinedSamples | StreamedMixture) -> dict[str, int]:
    parts = samples.parts if isinstance(samples, JoinedSamples) else []
    labels = [part.desirable for part in parts if isinstance(part, LabelledSamples)]
    desirable = sum(int(each.sum()) for each in labels)
    return {"desirable": desirable, "undesirable": sum(map(len, labels)) - desirable}


def _steps(samples: JoinedSamples | StreamedMixture) -> dict[str, int]:
    parts = samples.parts if isinstance(samples, JoinedSamples) else []
    loaded = (part.load(index, 0) for part in parts if isinstance(part, StepSamples) for index in range(len(part)))
    counts = [(int(each.own[1].sum()), int((each.own[1] & each.labels).sum())) for each in loaded]
    return {"steps": sum(steps for steps, _ in counts), "right": sum(right for _, right in counts)}


def _target_tokens(part: TokenSamples) -> int:
    """Counts target tokens without the first of each sample, which nothing precedes."""
    return sum(int(part.load(index, 0)[1][1:].sum()) for index in range(len(part)))


def _text_tokens(part: TextWindows, length: int) -> int:
    last = len(part) - 1
    return last * length + len(part.load(last, 0)[0])


def _histogram(lengths: np.ndarray) -> dict[str, Any]:
    """Returns a histogram; bins hold lengths `from` to `to`, both included."""
    edges = np.unique(np.linspace(lengths.min() - 1, lengths.max(), BINS + 1).round().astype(int))
    counts, _ = np.histogram(lengths, bins=edges + 0.5)
    low, middle, high = np.percentile(lengths, [5, 50, 95])
    return {
        "mean": round(float(lengths.mean()), 1),
        "longest": int(lengths.max()),
        "percentiles 5, 50, 95": [round(float(value)) for value in (low, middle, high)],
        "bins": [
            {"from": int(before) + 1, "to": int(end), "samples": int(count)}
            for (before, end), count in zip(pairwise(edges), counts, strict=True)
        ],
    }


def _padding(lengths: np.ndarray, longest: int) -> dict[str, float]:
    """Returns the share of positions that hold no token, in batches of 32 random samples, and tokens a position against
    each way when nothing is padded."""
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


def _repeated(train: Sequence[Tokenised], evaluation: Sequence[Tokenised]) -> tuple[int, int]:
    """Returns training samples that equal an earlier one, and evaluation samples that are trained on."""
    seen = set(_contents(train))
    duplicates = sum(map(len, train)) - len(seen)
    return duplicates, sum(content in seen for content in _contents(evaluation))


def _contents(parts: Sequence[Tokenised]) -> Iterator[bytes]:
    for part in parts:
        for index in range(len(part)):
            sample = part.load(index, 0)
            sides = sample.sides if isinstance(part, PairSamples) else [sample]
            yield b"".join(blake2b(ids.tobytes(), digest_size=16).digest() for ids, _ in sides)


def _sample(reader: LanguageReader, part: Tokenised) -> dict[str, Any]:
    """Returns the first sample, its text in pieces. If everything is trained, the first token, which nothing precedes,
    counts too: by itself it may be a part of a character."""
    ids, targets = part.load(0, 0)
    return {
        "from": part.name(0),
        "tokens": len(ids),
        "target tokens": int(targets[1:].sum()),
        "pieces": [{"text": text, "trained": trained} for text, trained in show(ids, targets, reader.tokenizer)],
    }
