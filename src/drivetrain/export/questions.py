"""The evaluation samples on which an export is compared with the run's model, and the model's own answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import problem
from drivetrain.workloads.base import Samples, Workload
from drivetrain.workloads.exporting import Dialogue, Exportable, Speaks
from drivetrain.workloads.generating import Generates

MOST_SCORES = 2**25  # numbers of all scores together: 128 MiB in fp32
MOST_TOKENS = 512  # of a sequence
PROMPTS, NEW_TOKENS, PROMPT_TOKENS = 4, 16, 24  # PROMPT_TOKENS: of a text, which has no prompt of its own
DIALOGUES = 6
BATCHES = (1, 2, 3)  # sizes of a classifier's batches, in turn: one alone, and some with padding
TEXTS = (
    "Hello, world!",
    "  two  spaces,\ttab\nand 1234567",
    "naïve Ünïcode ßtraße",
    "你好，世界。今天天气怎么样？",
    "🙂 ok",
)


@dataclass(frozen=True)
class Questions:
    """inputs: of plain forward passes. labels: of each, or None. keep: a sequence's last positions that count."""

    inputs: list[dict[str, Tensor]]
    labels: list[Tensor | None]
    keep: int | None = None
    prompts: list[list[int]] = field(default_factory=list)
    ends: frozenset[int] = frozenset()
    dialogues: list[Dialogue] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    text_ids: list[list[int]] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(len(next(iter(batch.values()))) for batch in self.inputs)


@dataclass(frozen=True)
class Reference:
    """The run's own answers. scores: as a runtime's. answers: greedy ids of each prompt. margins: of each of them, by
    how much the likeliest logit exceeded the next."""

    scores: list[Tensor]
    answers: list[list[int]]
    margins: list[list[float]]
    seconds: float


def questions_of(
    workload: Workload, model: nn.Module, count: int, positions: int = MOST_TOKENS, spare: int = 0
) -> Questions:
    """Takes `count` evaluation samples; of a run without evaluation data, training samples. positions: of a
    sequence, how many are compared at most. spare: the model's last places that no sequence fills. Raises UserError for
    a workload whose inputs have no plain form."""
    if not isinstance(workload, Exportable):
        why = f"{type(workload).__name__} has no plain inputs on which an export could be compared"
        raise problem("--to", why, "export a run of a language model, a classifier or a module of your own")
    samples = workload.evaluation if workload.evaluation is not None else workload.train
    taken = [samples.load(number, 0) for number in range(min(count, len(samples)))]
    if isinstance(workload, Generates) and isinstance(workload, Speaks):
        return _of_sequences(workload, model, samples, taken, positions, spare)
    sizes, batches = iter(BATCHES * len(taken)), []
    while taken:
        size = next(sizes)
        batches.append(workload.plain_batch(model, taken[:size]))
        taken = taken[size:]
    speaks = isinstance(workload, Speaks)
    return Questions(
        [batch.inputs for batch in batches],
        [batch.labels for batch in batches],
        texts=list(TEXTS) if speaks else [],
        text_ids=workload.encoded(TEXTS) if isinstance(workload, Speaks) else [],
    )


def _of_sequences(
    workload: Any, model: Any, samples: Samples, taken: Sequence[Any], positions: int, spare: int
) -> Questions:
    batches = [workload.plain_batch(model, [sample]) for sample in taken]
    longest = min(MOST_TOKENS, _places(model) - spare)
    inputs = [{name: tensor[:, :longest] for name, tensor in batch.inputs.items()} for batch in batches]
    vocabulary = model.config.get_text_config().vocab_size
    keep = max(1, min(positions, MOST_SCORES // (vocabulary * max(1, len(inputs)))))
    labels = [batch.labels[0, :longest][-keep:] for batch in batches]
    prompts = [list(each.ids) for each in workload.prompts_for(samples, range(min(PROMPTS, len(taken)))).values()]
    prompts = prompts or [batch["input_ids"][0, :PROMPT_TOKENS].tolist() for batch in inputs[:PROMPTS]]
    # beyond a model's places runtimes differ, and some stop: a whole answer has to fit
    most = min(MOST_TOKENS, _places(model) - NEW_TOKENS)
    prompts = [ids[-most:] for ids in prompts] if most > 0 else []
    return Questions(
        inputs,
        labels,
        keep,
        prompts=prompts,
        ends=workload.ends,
        dialogues=workload.dialogues(DIALOGUES),
        texts=list(TEXTS),
        text_ids=workload.encoded(TEXTS),
    )


def _places(model: Any) -> int:
    """Returns how many tokens the model has places for; more than are ever asked where it has no limit."""
    places: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return 2 * MOST_TOKENS if places is None else places


@torch.no_grad()
def reference_of(model: nn.Module, questions: Questions) -> Reference:
    """Returns what the model itself answers. Greedy answers take a whole forward pass a token, without a cache of keys
    and values, so that no cache is trusted."""
    scores = scores_of(model, questions)
    start = time.perf_counter()
    scores_of(model, questions)
    seconds = time.perf_counter() - start
    pairs = [_greedy(model, prompt, questions.ends) for prompt in questions.prompts]
    return Reference(scores, [ids for ids, _ in pairs], [margins for _, margins in pairs], seconds)


@torch.no_grad()
def scores_of(model: nn.Module, questions: Questions) -> list[Tensor]:
    """Returns of each batch its logits (B, classes), those of the kept positions (keep, vocabulary), or the outputs of
    a model of the user's own."""
    found = []
    for inputs in questions.inputs:
        output = output_of(model, inputs).float()
        found.append(output if questions.keep is None else output[0, -questions.keep :])
    return found


def output_of(model: nn.Module, inputs: dict[str, Tensor], **settings: bool) -> Tensor:
    """Returns the logits, or the tensor that the user's own model returns. A single input of any name but Transformers'
    is passed by its place."""
    output = model(inputs["input"]) if set(inputs) == {"input"} else model(**inputs, **settings)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def _greedy(model: Any, prompt: Sequence[int], ends: frozenset[int]) -> tuple[list[int], list[float]]:
    ids, margins = list(prompt), list[float]()
    while len(ids) - len(prompt) < NEW_TOKENS:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        (first, second), (token, _) = (each.tolist() for each in logits.topk(2))
        ids.append(token)
        margins.append(first - second)
        if token in ends:
            break
    return ids[len(prompt) :], margins
