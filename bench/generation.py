"""Answers of the generation engine beside Transformers' `generate`: tokens a second, and when the first token comes.

    python bench/generation.py

A Llama of random weights answers batches of 1, 8 and 64 prompts. Prompts and answers have uneven lengths, as those of
users have: `generate` pads prompts to the longest and goes on until the longest answer is over, with a stopping
criterion for each row as an end token would be. Both sides run in one process, in turns that swap from pair to pair;
the ratio of a batch is the median of its pairs. Tokens count that a request wanted, and all are the likeliest.

Another batch asks eight times for an answer to one prompt, as reinforcement learning does: the engine runs it and keeps
its keys and values once, `generate` gets it eight times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import BENCH
from tables import machine_line, markdown_table, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, StoppingCriteria

from drivetrain.generation.requests import Piece, Request
from drivetrain.inference.loading import LoadedModel, load_model
from drivetrain.runtime.openmp import end_helpers

VOCABULARY = 16_000
PROMPT, ANSWER = (8, 128), (4, 48)  # tokens: the least and the most
BATCHES = {1: 6, 8: 3, 64: 1}  # prompts → pairs
GROUP, LONG = 8, 300  # answers to one prompt, and its tokens


@dataclass(frozen=True)
class Asked:
    ids: tuple[int, ...]
    wanted: int


@dataclass(frozen=True)
class Turn:
    """One side once. processor: seconds of all cores. firsts: seconds until each request had its first token. answers:
    the tokens."""

    seconds: float
    processor: float
    firsts: list[float]
    answers: list[list[int]]

    @property
    def rate(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


Side = Callable[[Sequence[Asked]], Turn]


class _Clock:
    """Seconds since it was made: of the wall, and of this process on all cores."""

    def __init__(self) -> None:
        self.start, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.start, time.process_time() - self._processor


def main() -> None:
    parser = argparse.ArgumentParser(description="answers beside Transformers' generate")
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "generation.md")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--pairs", type=int, help="of each batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="generation-") as folder:
        model = made_model(Path(folder))
        parameters = sum(each.numel() for each in model.parameters())
        loaded = load_model(folder)
        ours, theirs = engine_side(loaded), generate_side(model)
        rows = [measured(number, ours, theirs, options.pairs or BATCHES.get(number, 3)) for number in options.batches]
        rows.append(measured(GROUP, ours, theirs, options.pairs or 3, is_group=True))
        loaded.close()
    titles = ["prompts", "pairs", "engine tokens/s", "generate tokens/s", "ratio", "quartiles", "processor time"]
    titles += ["engine first token", "generate first token", "same answers"]
    text = (
        "# Answers of the generation engine beside Transformers' generate\n\n"
        f"`python bench/generation.py` repeats it. {machine_line()}\n\n"
        f"A Llama of {parameters / 1e6:.0f} million random parameters in fp32; prompts of {PROMPT[0]} to {PROMPT[1]} "
        f"tokens, answers of {ANSWER[0]} to {ANSWER[1]}; in the last row {GROUP} answers to one prompt of {LONG} "
        "tokens, which `generate` is given for each. Both sides in one process, in turns; the ratio is the median "
        "of the pairs, above 1 the engine is quicker; processor time: generate's over the engine's, of which "
        "other programs take nothing. First token: the median over requests, all asked at once.\n\n"
    )
    write(options.output, text + markdown_table(titles, rows) + "\n")


def measured(number: int, ours: Side, theirs: Side, pairs: int, is_group: bool = False) -> list[str]:
    found = figures(pairs_of(number, ours, theirs, pairs, is_group=is_group))
    rates, firsts = found["rates"], found["first_tokens"]
    low, middle, high = found["ratios"]
    return [
        f"1, {number} answers" if is_group else str(number),
        str(pairs),
        *(f"{rate:.1f}" for rate in rates),
        *(f"**{middle:.2f}**", f"{low:.2f} to {high:.2f}", f"{found['processor']:.2f}"),
        *(f"{first * 1000:.0f} ms" for first in firsts),
        "{} of {}".format(*found["same"]),
    ]


def pairs_of(
    number: int, ours: Side, theirs: Side, pairs: int, vocabulary: int = VOCABULARY, is_group: bool = False
) -> list[tuple[Turn, Turn]]:
    """Returns turns of both sides, which swap from pair to pair, after one that warms up."""
    draw = np.random.default_rng(number)
    ask = group if is_group else asked
    warm = ask(number, np.random.default_rng(99), vocabulary)
    for side in (ours, theirs):
        side(warm)
    found: list[tuple[Turn, Turn]] = []
    for turn in range(pairs):
        questions = ask(number, draw, vocabulary)
        order = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
        made = [side(questions) for side in order]
        found.append((made[turn % 2], made[1 - turn % 2]))
        print(f"batch {number}: {found[-1][0].rate:.1f} and {found[-1][1].rate:.1f} tokens/s", flush=True)
    return found


def figures(found: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    """Returns medians of both sides, the quartiles of their ratio, and how many answers are the same."""
    ratios = [mine.rate / other.rate for mine, other in found]
    same = [a == b for mine, other in found for a, b in zip(mine.answers, other.answers, strict=True)]
    return {
        "rates": [statistics.median(pair[side].rate for pair in found) for side in (0, 1)],
        "ratios": np.quantile(ratios, (0.25, 0.5, 0.75)).tolist(),
        "processor": statistics.median(other.processor / mine.processor for mine, other in found),
        "first_tokens": [statistics.median(each for pair in found for each in pair[side].firsts) for side in (0, 1)],
        "same": (sum(same), len(same)),
    }


def asked(number: int, draw: np.random.Generator, vocabulary: int) -> list[Asked]:
    return [
        Asked(tuple(draw.integers(vocabulary, size=draw.integers(*PROMPT)).tolist()), int(draw.integers(*ANSWER)))
        for _ in range(number)
    ]


def group(number: int, draw: np.random.Generator, vocabulary: int) -> list[Asked]:
    """Returns requests of one prompt."""
    ids = tuple(draw.integers(vocabulary, size=LONG).tolist())
    return [Asked(ids, int(draw.integers(*ANSWER))) for _ in range(number)]


def engine_side(loaded: LoadedModel) -> Side:
    def turn(questions: Sequence[Asked]) -> Turn:
        received = [_Received() for _ in questions]
        clock = _Clock()
        for each, receive in zip(questions, received, strict=True):
            loaded.generator.submit(Request(each.ids, each.wanted), receive)
        for receive in received:
            receive.over.wait()
        spent = clock.read()
        return Turn(*spent, [each.first - clock.start for each in received], [each.tokens for each in received])

    return turn


class _Received:
    def __init__(self) -> None:
        self.first, self.tokens, self.over = 0.0, list[int](), threading.Event()

    def __call__(self, piece: Piece) -> None:
        self.first = self.first or time.perf_counter()
        self.tokens += piece.tokens
        if piece.finish_reason is not None:
            self.over.set()


def generate_side(model: Any) -> Side:
    def turn(questions: Sequence[Asked]) -> Turn:
        clock = _Clock()
        longest = max(len(each.ids) for each in questions)
        ids = torch.zeros(len(questions), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(questions):
            ids[row, longest - len(each.ids) :] = torch.tensor(each.ids)
            mask[row, longest - len(each.ids) :] = 1
        until = _Wanted(longest, [each.wanted for each in questions])
        made = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(each.wanted for each in questions),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=model.config.vocab_size,  # never chosen; an end token is what makes it heed ended rows
            stopping_criteria=[until],
        )
        spent = clock.read()
        end_helpers()  # which would slow down the engine's, that are another thread's
        answers = [row[longest : longest + each.wanted].tolist() for row, each in zip(made, questions, strict=True)]
        return Turn(*spent, [until.first - clock.start] * len(questions), answers)

    return turn


class _Wanted(StoppingCriteria):  # type: ignore[misc]
    """Ends each row at its own length, as an end token there would. Notes when the first token was there."""

    def __init__(self, prompt: int, wanted: Sequence[int]) -> None:
        self._ends, self.first = prompt + torch.tensor(wanted), 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        del scores, kwargs
        self.first = self.first or time.perf_counter()
        return (input_ids.shape[1] >= self._ends).to(input_ids.device)


def made_model(folder: Path) -> Any:
    """Writes a Llama and a tokenizer of as many words into the folder; returns the model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(prefix="##")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return model


if __name__ == "__main__":
    main()
