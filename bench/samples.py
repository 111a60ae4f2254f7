"""Data for the benches: real ones cut to size, or made here, so that a bench runs on any machine.

Made images are JPEGs of 32 x 32 pixels: a coarse coloured pattern a class, shifted, under noise. Made texts are
sentences of words that two classes use unequally often, with log-normal lengths like those of reviews.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

CLASSES = 10
PIXELS = 32
WORDS = 2000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Images:
    """Folders of class folders."""

    train: Path
    evaluation: Path


@dataclass(frozen=True)
class Texts:
    """CSV files with the columns text and label, and a WordPiece vocabulary."""

    train: Path
    evaluation: Path
    vocab: Path


def images(source: Path | None, to: Path, num_train: int, num_evaluation: int, seed: int = 0) -> Images:
    """Class folders below `to`, from `source` (a folder that holds train/ and test/) or made.

    As many of each class as the numbers allow, drawn at random.
    """
    rng = np.random.default_rng(seed)
    for part, given, number in (("train", "train", num_train), ("evaluation", "test", num_evaluation)):
        if source is None:
            _make_images(to / part, number, rng)
        else:
            _copy_images(source / given, to / part, number, rng)
    return Images(to / "train", to / "evaluation")


def texts(
    source: Path | None,
    vocab: Path | None,
    to: Path,
    num_train: int | None,
    num_evaluation: int,
    seed: int = 0,
    columns: tuple[str, str] = ("review", "label"),
) -> Texts:
    """Shuffled training and evaluation files below `to`, from `source` (a CSV; num_train None: all) or made."""
    if (source is None) != (vocab is None):
        raise SystemExit("give --text and --vocab, or neither")
    rng = np.random.default_rng(seed)
    to.mkdir(parents=True, exist_ok=True)
    if source is None or vocab is None:
        vocab = to / "vocab.txt"
        vocab.write_text("\n".join([*SPECIAL, *(_word(i) for i in range(WORDS))]) + "\n", encoding="utf-8")
        frame = _made_texts((num_train or 2000) + num_evaluation, rng)
    else:
        read = pd.read_csv(source)[list(columns)].dropna()
        frame = pd.DataFrame({"text": read[columns[0]].astype(str), "label": read[columns[1]]})
    frame = frame.iloc[rng.permutation(len(frame))]
    evaluation, train = frame.iloc[:num_evaluation], frame.iloc[num_evaluation:]
    train.iloc[:num_train].to_csv(to / "train.csv", index=False)
    evaluation.to_csv(to / "evaluation.csv", index=False)
    return Texts(to / "train.csv", to / "evaluation.csv", vocab)


def _copy_images(source: Path, to: Path, number: int, rng: np.random.Generator) -> None:
    if not source.is_dir():
        raise SystemExit(f"{source} is no folder: --images takes a folder that holds train/ and test/")
    folders = sorted(path for path in source.iterdir() if path.is_dir())
    for folder, share in zip(folders, _shares(number, len(folders)), strict=True):
        files = sorted(folder.iterdir())
        (to / folder.name).mkdir(parents=True)
        for i in rng.permutation(len(files))[:share]:
            shutil.copy(files[i], to / folder.name / files[i].name)


def _make_images(to: Path, number: int, rng: np.random.Generator) -> None:
    patterns = np.random.default_rng(1).uniform(60, 196, (CLASSES, 8, 8, 3))  # the same for training and evaluation
    for label, share in enumerate(_shares(number, CLASSES)):
        folder = to / f"class{label}"
        folder.mkdir(parents=True)
        for i in range(share):
            shifted = np.roll(patterns[label], rng.integers(0, 8, 2), axis=(0, 1)).repeat(4, axis=0).repeat(4, axis=1)
            noisy = shifted + rng.normal(0, 40, (PIXELS, PIXELS, 3))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{i:05d}.jpg", quality=75)


def _made_texts(number: int, rng: np.random.Generator) -> pd.DataFrame:
    labels = rng.integers(0, 2, number)
    lengths = np.exp(rng.normal(np.log(85), 0.8, number)).clip(5, 600).astype(int)
    frequency = 1.0 / np.arange(1, WORDS + 1)
    taste = rng.permutation(np.linspace(0.8, 1.2, WORDS))  # class 1 likes what class 0 dislikes
    chances = [frequency * taste, frequency * (2 - taste)]
    words = np.array([_word(i) for i in range(WORDS)])
    rows = [
        " ".join(rng.choice(words, length, p=chances[label] / chances[label].sum()))
        for label, length in zip(labels, lengths, strict=True)
    ]
    return pd.DataFrame({"text": rows, "label": labels})


def _word(number: int) -> str:
    return "".join(chr(ord("a") + number // 26**place % 26) for place in range(3))


def _shares(number: int, parts: int) -> Sequence[int]:
    return [number // parts + (i < number % parts) for i in range(parts)]
