"""Data of any size for benchmarks: generated, in bounded memory, the same for every seed.

    python bench/data_made.py conversations data.jsonl --rows 500000
    python bench/data_made.py reviews reviews.csv.gz --rows 1000000
    python bench/data_made.py conversations shards --rows 1000000 --shards 1000 --ending .jsonl.zst

Words are drawn by Zipf's law from a vocabulary of syllables, so that a tokenizer meets common words often and rare ones
seldom, as in prose. Lengths are log-normal.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import TextIO

import numpy as np

VOCABULARY = 20_000
SYLLABLES = [c + v + e for c in "bdfgklmnprstvw" for v in "aeiou" for e in ("", "n", "r", "s")]
AT_ONCE = 1 << 16  # words drawn together
AT_MOST_MADE = 200_000  # different rows
STARS = ("bad", "good", "mixed")


@cache
def vocabulary() -> np.ndarray:
    """Returns (VOCABULARY,) words, the same for every seed."""
    named = np.random.default_rng(0)
    count = named.integers(1, 5, VOCABULARY)
    return np.array(["".join(named.choice(SYLLABLES, each)) for each in count], dtype=object)


class Words:
    """Texts of words, one after the other."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._words = vocabulary()
        self._drawn: list[str] = []
        self._next = 0

    def count(self, median: float, most: int) -> int:
        return int(np.clip(self._rng.lognormal(np.log(median), 0.6), 3, most))

    def text(self, median: float, most: int = 2000) -> str:
        """A text of sentences."""
        words = self._take(self.count(median, most))
        for start in range(0, len(words), 12):
            words[start] = words[start].capitalize()
            last = min(start + 11, len(words) - 1)
            words[last] += "."
        return " ".join(words)

    def one_of(self, among: tuple[str, ...]) -> str:
        return among[int(self._rng.integers(len(among)))]

    def _take(self, count: int) -> list[str]:
        if self._next + count > len(self._drawn):
            self._drawn = self._words[self._rng.zipf(1.15, AT_ONCE) % VOCABULARY].tolist()
            self._next = 0
        taken = self._drawn[self._next : self._next + count]
        self._next += count
        return taken


def conversation(words: Words) -> dict[str, object]:
    """Two turns in OpenAI's form, of about 880 bytes."""
    turns = [("user", 11), ("assistant", 35), ("user", 7), ("assistant", 25)]
    return {"messages": [{"role": role, "content": words.text(median)} for role, median in turns]}


def document(words: Words) -> dict[str, object]:
    """A text of about 850 bytes."""
    return {"text": words.text(88)}


def review(words: Words) -> dict[str, object]:
    """A text of about 360 bytes with a quoted line end, and its label."""
    return {"text": f'{words.text(20)}\n"{words.text(17)}"', "label": words.one_of(STARS)}


KINDS: dict[str, Callable[[Words], dict[str, object]]] = {
    "conversations": conversation,
    "documents": document,
    "reviews": review,
}


def rows(kind: str, count: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Returns so many rows; those beyond AT_MOST_MADE are the first ones again."""
    words = Words(seed)
    made = (KINDS[kind](words) for _ in range(min(count, AT_MOST_MADE)))
    return islice(cycle(made), count) if count > AT_MOST_MADE else made


def write(path: Path, kind: str, count: int, seed: int = 0) -> Path:
    """Write rows in the format that the file's ending names: jsonl, json, csv, tsv, txt, parquet; compressed too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    suffixes = [each for each in path.suffixes if each not in PACKED]
    made = rows(kind, count, seed)
    if suffixes[-1] == ".parquet":
        _write_parquet(path, made)
        return path
    with _opened(path) as file:
        _WRITERS[suffixes[-1]](file, made)
    return path


def write_shards(folder: Path, kind: str, count: int, shards: int, ending: str, seed: int = 0) -> Path:
    """Write `count` rows into so many files of nearly one size."""
    for number in range(shards):
        share = count // shards + (number < count % shards)
        write(folder / f"shard-{number:05d}{ending}", kind, share, seed * shards + number)
    return folder


def _write_json_lines(file: TextIO, made: Iterator[dict[str, object]]) -> None:
    for row in made:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_json(file: TextIO, made: Iterator[dict[str, object]]) -> None:
    file.write("[")
    for number, row in enumerate(made):
        file.write((",\n" if number else "\n") + json.dumps(row, ensure_ascii=False))
    file.write("\n]\n")


def _write_separated(separator: str) -> Callable[[TextIO, Iterator[dict[str, object]]], None]:
    def written(file: TextIO, made: Iterator[dict[str, object]]) -> None:
        writer = None
        for row in made:
            if writer is None:
                writer = csv.DictWriter(file, list(row), delimiter=separator)
                writer.writeheader()
            writer.writerow(row)

    return written


def _write_texts(file: TextIO, made: Iterator[dict[str, object]]) -> None:
    for row in made:
        file.write(f"{row['text']}\n\n")


_WRITERS: dict[str, Callable[[TextIO, Iterator[dict[str, object]]], None]] = {
    ".jsonl": _write_json_lines,
    ".json": _write_json,
    ".csv": _write_separated(","),
    ".tsv": _write_separated("\t"),
    ".txt": _write_texts,
}
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    if path.suffix not in PACKED:
        with path.open("w", encoding="utf-8", newline="") as file:
            yield file
    elif path.suffix == ".xz":
        import lzma

        with lzma.open(path, "wt", encoding="utf-8", newline="", preset=1) as file:
            yield file
    else:
        import pyarrow as pa

        with pa.output_stream(str(path), compression=PACKED[path.suffix]) as packed:
            file = io.TextIOWrapper(io.BufferedWriter(packed), encoding="utf-8", newline="")
            yield file
            file.flush()
            file.detach().detach()


def _write_parquet(path: Path, made: Iterator[dict[str, object]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, held = None, []
    for row in made:
        held.append(row)
        if len(held) == 10_000:
            table = pa.Table.from_pylist(held)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            held = []
    if held or writer is None:
        table = pa.Table.from_pylist(held)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("path", type=Path, help="a file, or with --shards a folder")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--ending", default=".jsonl", help="of each shard")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.shards:
        write_shards(given.path, given.kind, given.rows, given.shards, given.ending, given.seed)
    else:
        write(given.path, given.kind, given.rows, given.seed)


if __name__ == "__main__":
    main()
