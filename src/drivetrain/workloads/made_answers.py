"""Answers that a model made to learn from: as checkpoints hold them, and as batches have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.config.generation import Generation
from drivetrain.config.reinforcement import RLOO, Reinforcement
from drivetrain.data.language.samples import PromptSample, Sample
from drivetrain.data.ordered_cuts import OrderedSizes
from drivetrain.workloads.advantages import advantages
from drivetrain.workloads.generating import OF_REWARD, Drawn, JudgedAnswer, Making, Prompt
from drivetrain.workloads.rewarding import Answered

VALUES = "advantages", "old", "reference"  # of a batch, shaped as targets
DRAWN, CORRECTION = "drawn", "correction"  # log-probabilities of the generator; weights of tokens that make up for them

USUAL = ("advantages", CORRECTION)  # of an answer's tokens, where nothing else is known: its advantage, and 1
Made = dict[str, Any]  # an answer in a checkpoint's forms: ids, prompt (its tokens), old, reference, reward, ...


def made_of(answer: Answered, values: Mapping[str, Any], masks_truncated: bool) -> Made:
    """Returns an answer to learn from. values: what is known of it, such as its reward. masks_truncated: nothing is
    learned from one that was cut off."""
    return {
        "ids": torch.tensor([*answer.prompt.ids, *answer.ids], dtype=torch.int32),
        "prompt": len(answer.prompt.ids),
        "expected": answer.prompt.reference,
        "truncated": int(answer.truncated),
        "learned": int(not (masks_truncated and answer.truncated)),
        "advantage": 0.0,
        DRAWN: torch.tensor(answer.logprobs, dtype=torch.float32),
        "old": torch.full((len(answer.ids),), torch.nan),  # until they are known
        "reference": torch.zeros(0),
        **values,
    }


def judged_answer(answer: Answered, values: Mapping[str, Any]) -> JudgedAnswer:
    """values: of the rewards, as Rewarding gives them."""
    single = {f"{OF_REWARD}{name}": value for name, value in values["values"].items()}
    of_answer = {"answer_tokens": float(len(answer.ids)), "truncated": float(answer.truncated)}
    return JudgedAnswer({"reward": values["reward"], **single, **of_answer}, values["failures"])


def with_answers(samples: Sequence[Made | PromptSample], most: int) -> list[Made]:
    """Returns answers as they are. A prompt stands for one with an answer of `most` tokens, which memory is measured
    with."""
    return [_longest_answer(each, most) if isinstance(each, PromptSample) else each for each in samples]


def _longest_answer(prompt: PromptSample, most: int) -> Made:
    ids = np.concatenate([prompt.ids, np.zeros(most, dtype=np.int32)])
    return {"ids": torch.from_numpy(ids), "prompt": len(prompt.ids), "advantage": 0.0, "learned": 1}


def invented_answer(prompt: PromptSample, number: int, most: int) -> Made:
    """Returns an answer that no model made, of up to `most` of the prompt's own tokens, with an advantage: a function
    of `number` alone. The log-probabilities before the update are those that the update finds."""
    generator = np.random.default_rng(number)
    count = int(generator.integers(1, most, endpoint=True))
    ids = np.concatenate([prompt.ids, generator.choice(prompt.ids, count)])
    return {
        "ids": torch.from_numpy(ids.astype(np.int32)),
        "prompt": len(prompt.ids),
        "advantage": float(generator.standard_normal()),
        "learned": 1,
        "old": torch.full((count,), torch.nan),
        "reference": torch.from_numpy(generator.uniform(-12.0, -2.0, count).astype(np.float32)),
    }


def sample_of(made: Made) -> Sample:
    """Returns ids, and whether each is learned from."""
    ids = made["ids"].numpy()
    return ids, (np.arange(len(ids)) >= made["prompt"]) & bool(made["learned"])


def shared(answers: Sequence[Made]) -> list[int]:
    """Returns for each answer how many first tokens of the answer before it its own prompt has too: all but the last
    where both answer one prompt."""
    found = [0] * min(1, len(answers))
    for before, each in pairwise(answers):
        size = each["prompt"]
        same = size == before["prompt"] and torch.equal(each["ids"][:size], before["ids"][:size])
        found.append(size - 1 if same else 0)
    return found


def sizes_of(answers: Sequence[Made], shares: bool, packed: bool) -> OrderedSizes:
    """Returns how many tokens the answers have in a batch, with their prompts. shares: whether those to one prompt
    hold it once."""
    tokens = np.array([len(each["ids"]) for each in answers], dtype=np.int64)
    return OrderedSizes(tokens, np.array(shared(answers)) if shares else np.zeros_like(tokens), packed)


def with_advantages(answers: Sequence[Made], rewards: Tensor, learning: Reinforcement, stage: str) -> list[Made]:
    """Returns the answers with how much better each was rewarded than its group. rewards: (groups, answers)."""
    if stage == RLOO and learning.beta:  # Ahmadian et al. 2024, equation 3
        divergence = [float((each["old"] - each["reference"]).sum()) for each in answers]
        rewards = rewards - learning.beta * torch.tensor(divergence, dtype=torch.float64).view_as(rewards)
    found = advantages(rewards, learning.scale_of(stage), stage == RLOO)
    return [{**each, "advantage": value} for each, value in zip(answers, found.flatten().tolist(), strict=True)]


def values_of(made: Made, name: str) -> Tensor:
    """Returns the values at an answer's tokens that are learned from."""
    count = (len(made["ids"]) - made["prompt"]) * made["learned"]
    values = made.get(name)
    if values is None and name in USUAL:
        return torch.full((count,), made["advantage"] if name == "advantages" else 1.0)
    return torch.zeros(count) if values is None or not count or not len(values) else values


def correction_of(made: Made, learning: Reinforcement) -> Tensor:
    """Returns the weight of each token that makes up for a generator that draws by other probabilities π_gen than the
    trainer computes: π_old / π_gen of the token, or the product of these over the answer; beyond the bounds the bound
    (truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"), or 0 (masked: Liu et al. 2025, "When Speed Kills Stability"). 1 where π_gen is not known."""
    if len(made[DRAWN]) != len(made["old"]):
        return torch.ones_like(made["old"])
    level, _, beyond = (learning.importance_correction or "token_truncate").partition("_")
    apart = made["old"] - made[DRAWN]
    weights = (apart if level == "token" else apart.sum().expand_as(apart)).exp()
    bounded = weights.clamp(min=learning.importance_floor, max=learning.importance_cap)
    return bounded if beyond == "truncate" else torch.where(bounded == weights, weights, 0.0)


def drawn_answers(
    asked: Sequence[Prompt], draws: Sequence[int], drawing: Generation, passes: Making
) -> list[tuple[Drawn, str]]:
    """Returns the answer to each prompt, with its key in the journal; those that the journal has are not made again."""
    journal = passes.journal
    keys = [journal.key("answer", draw, list(prompt.ids)) for draw, prompt in zip(draws, asked, strict=True)]
    known: list[Any] = passes.once(lambda: [journal.found(key) for key in keys])
    lacking = [number for number, found in enumerate(known) if found is None]

    def came(number: int, drawn: Drawn) -> None:
        journal.keep_all({keys[lacking[number]]: [drawn.tokens, drawn.logprobs]})

    found = passes.answers([asked[n] for n in lacking], [draws[n] for n in lacking], drawing, came)
    for number, answer in zip(lacking, found, strict=True):
        known[number] = [answer.tokens, answer.logprobs]
    if passes.by_server:
        passes.once(lambda: journal.count_again("answers", len(lacking) if journal.is_again else 0))
    else:  # all at once: one that is drawn beside fewer others may differ in its last bits
        passes.once(lambda: journal.keep_all({keys[n]: known[n] for n in lacking}))
    # journals of earlier versions have tokens alone
    both = [(each, []) if isinstance(each[0], int) else each for each in known]
    return [(Drawn(*each), key) for each, key in zip(both, keys, strict=True)]


def draw_of(draw: int, number: int) -> int:
    """Returns the number of the draw that an answer of a group is made with. draw: of its prompt."""
    return int(np.random.SeedSequence((draw, number)).generate_state(1, np.uint64)[0] >> 1)
