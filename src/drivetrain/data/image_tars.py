"""Reads pictures in tar archives in WebDataset's layout: the files of one sample share a name up to its first dot.

    shard-000.tar:  0001.jpg 0001.cls 0002.jpg 0002.cls ...        the label: a file .cls, or a key of a file .json

The position of each picture is found once, from the headers, and kept in arrays: any picture is then one read at an
offset, so that samples come in the order of any other data set, and a run goes on at any step. Compressed archives have
no offsets to read at.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np

from drivetrain.data.array_store import Store, Writer, stored
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.mapped_texts import MappedTexts
from drivetrain.data.shard_paths import shard_files
from drivetrain.errors import Problem, RunError, UserError, counted, problem
from drivetrain.runtime.progress_line import ProgressLine

FORMAT = 1
NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # WebDataset's: what stands before the first dot of a file's name
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}
ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
LONGEST_LABEL = 1 << 20  # bytes of a .cls or .json
BEHIND = 10_240  # bytes behind an archive's end that are looked at: what tar fills its last record up to
MOST_SHOWN = 5


@dataclass(frozen=True)
class TarPictures:
    """N pictures in archives. files: the archives."""

    store: Store
    files: Sequence[Path]
    key: str

    @property
    def labels(self) -> tuple[np.ndarray, list[str]]:
        """The numbers of the labels, (N,), and the names that they stand for."""
        return self.store.array("labels"), self.store.facts["labels"]

    @property
    def bad(self) -> list[BadRow]:
        """Samples that cannot be used, and are not among the N."""
        return [BadRow(where, why) for where, why in self.store.facts["bad"]]

    @property
    def notes(self) -> list[str]:
        count, first = self.store.facts["without"]
        lost = f"{counted(count, 'sample')} of the archives left out for want of a picture"
        return [f"{lost}, {first} first"] if count else []

    @property
    def names(self) -> Sequence[str]:
        return MappedTexts(self.store.array("names"), self.store.array("name_ends"))

    def opener(self) -> Opener:
        shards, offsets, sizes = (self.store.array(name) for name in ("shards", "offsets", "sizes"))
        return Opener(shards, offsets, sizes, self.files, [tuple(state) for state in self.store.facts["states"]])


@dataclass(frozen=True)
class Opener:
    """Reads a picture's bytes. states: size and time of change of each archive when it was indexed."""

    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    files: Sequence[Path]
    states: Sequence[tuple[int, int]]

    def __call__(self, index: int) -> io.BytesIO:
        """Reads a picture. Raises RunError if the archive changed since it was indexed: another picture may lie there
        now."""
        number = int(self.shards[index])
        with self.files[number].open("rb", buffering=0) as opened:
            found = os.fstat(opened.fileno())
            if (found.st_size, found.st_mtime_ns) != self.states[number]:
                raise RunError(f"{self.files[number]} changed since its pictures were listed; start again")
            return io.BytesIO(os.pread(opened.fileno(), int(self.sizes[index]), int(self.offsets[index])))


def tar_pictures(
    path: str, field: str, suffixes: Collection[str], label_key: str | None, cache: Path
) -> tuple[TarPictures, str | None]:
    """Returns the pictures of the archives that `path` stands for, and a warning if the cache cannot be used.
    label_key: the key of a label in a .json; None: labels are not needed.

    Raises UserError with all archives that are compressed, truncated or no archives, and if no sample has a picture.
    """
    files = shard_files(path, field, ENDINGS)
    states = [(state.st_size, state.st_mtime_ns) for state in map(os.stat, files)]
    described = repr((FORMAT, [str(file.resolve()) for file in files], states, sorted(suffixes), label_key))
    key = blake2b(described.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()

    def build(folder: Path) -> None:
        _build(folder, files, states, field, suffixes, label_key)

    store, warning = stored(cache, f"tars-{key}", build)
    if not len(store.array("shards")):
        first = f": {store.facts['bad'][0][0]}: {store.facts['bad'][0][1]}" if store.facts["bad"] else ""
        fix = "lay samples out as 0001.jpg and 0001.cls (or a 0001.json with the label)"
        raise problem(field, f"no sample of {path} can be used{first}", fix)
    return TarPictures(store, files, key), warning


@dataclass
class _Found:
    """Facts from the archives' headers so far, beside the arrays."""

    labels: dict[str, int] = field(default_factory=dict)
    bad: list[tuple[str, str]] = field(default_factory=list)
    without: list[Any] = field(default_factory=lambda: [0, ""])


def _build(
    folder: Path,
    files: Sequence[Path],
    states: Sequence[tuple[int, int]],
    where: str,
    suffixes: Collection[str],
    label_key: str | None,
) -> None:
    found, problems = _Found(), list[Problem]()
    shown = ProgressLine("listing archives", sum(size for size, _ in states))
    with Writer(folder) as writer:
        for number, file in enumerate(files):
            try:
                samples = _samples(file)
            except (tarfile.TarError, OSError, ValueError) as error:
                problems.append(
                    Problem(where, f"{file} {_reason(error)}", "replace it by a whole, uncompressed archive")
                )
                continue
            _append(writer, number, file, samples, found, suffixes, label_key)
            shown.add(states[number][0])
        shown.end()
        if len(problems) > MOST_SHOWN:
            more = Problem(where, f"{len(problems) - MOST_SHOWN} more archives cannot be read", "replace them too")
            problems = [*problems[:MOST_SHOWN], more]
        if problems:
            raise UserError(problems)
        if [(state.st_size, state.st_mtime_ns) for state in map(os.stat, files)] != states:
            raise problem(where, "an archive changed while it was listed", "start again when all are written")
        facts = {"labels": list(found.labels), "bad": found.bad, "without": found.without, "states": states}
        writer.finish(facts)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _Refused) else f"cannot be read as a tar archive: {error}"


class _Refused(ValueError):
    """Why an archive is refused: the end of a sentence that begins with the archive's name."""


Members = dict[str, list[tuple[str, int, int]]]  # sample → (ending, offset, size) of its files


def _samples(file: Path) -> tuple[Members, dict[tuple[int, int], bytes]]:
    """Returns samples in the order of their first files, and the bytes of their labels' files by (offset, size).

    Raises an error for an archive that is compressed, truncated, or goes on behind its end.
    """
    members: Members = {}
    contents: dict[tuple[int, int], bytes] = {}
    with file.open("rb") as opened:
        start = opened.read(8)
        if kind := next((kind for mark, kind in COMPRESSED.items() if start.startswith(mark)), None):
            raise _Refused(f"is compressed ({kind}): its pictures cannot be read one by one; unpack it to a plain .tar")
        opened.seek(0)
        with tarfile.open(fileobj=opened, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it keeps all of them
                named = NAME.fullmatch(member.name)
                if not member.isreg() or member.issparse() or named is None:
                    continue
                ending = named[2].lower()
                members.setdefault(named[1], []).append((ending, member.offset_data, member.size))
                if ending in {"cls", "json"} and member.size <= LONGEST_LABEL:
                    opened.seek(member.offset_data)
                    contents[member.offset_data, member.size] = opened.read(member.size)
            _check_end(opened, archive.offset)
    return members, contents


def _check_end(opened: IO[bytes], end: int) -> None:
    """Checks the end of an archive: two blocks of zeros, of which the second is often left out; tarfile does not
    check."""
    opened.seek(0, os.SEEK_END)
    size = opened.tell()
    opened.seek(end)
    block = opened.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE or block.strip(b"\0"):
        raise _Refused(f"ends at byte {size:,} without the mark of an archive's end: it was cut, or is being written")
    if opened.read(BEHIND).strip(b"\0"):
        raise _Refused(f"goes on behind its end at byte {end:,}, as archives that were joined by cat do")


def _append(
    writer: Writer,
    number: int,
    file: Path,
    read: tuple[Members, dict[tuple[int, int], bytes]],
    found: _Found,
    suffixes: Collection[str],
    label_key: str | None,
) -> None:
    samples, contents = read
    offsets, sizes, labels, names = [], [], [], []
    for sample, parts in samples.items():
        pictures = [part for part in parts if f".{part[0]}" in suffixes]
        if not pictures:
            found.without[0] += 1
            found.without[1] = found.without[1] or f"{file.name}/{sample}"
            continue
        try:
            if len(pictures) > 1:
                raise _Refused(f"it has {len(pictures)} pictures")
            label = "" if label_key is None else _label(parts, contents, label_key)
        except _Refused as error:
            found.bad.append((f"{file.name}/{sample}", str(error)))
            continue
        ending, offset, size = pictures[0]
        offsets.append(offset)
        sizes.append(size)
        labels.append(found.labels.setdefault(label, len(found.labels)))
        names.append(f"{file.name}/{sample}.{ending}".encode("utf-8", "surrogatepass"))
    writer.append("shards", np.full(len(offsets), number, np.int32))
    writer.append("offsets", np.array(offsets, np.int64))
    writer.append("sizes", np.array(sizes, np.int64))
    writer.append("labels", np.array(labels, np.int32))
    writer.append("names", np.frombuffer(b"".join(names), np.uint8))
    writer.append_ends("name_ends", [len(name) for name in names])


def _label(parts: Sequence[tuple[str, int, int]], contents: dict[tuple[int, int], bytes], key: str) -> str:
    """Returns the label from the sample's .cls, or else from the key of its .json. Raises _Refused."""
    by_ending = dict(_contents(parts, contents))
    if "cls" in by_ending:
        try:
            text = by_ending["cls"].decode("utf-8").strip()
        except UnicodeDecodeError:
            raise _Refused("its .cls is not UTF-8") from None
        if not text:
            raise _Refused("its .cls is empty")
        return text
    if "json" not in by_ending:
        raise _Refused("it has no label: neither a .cls nor a .json")
    try:
        held = json.loads(by_ending["json"])
    except ValueError:
        raise _Refused("its .json cannot be read") from None
    value = held.get(key) if isinstance(held, dict) else None
    if not isinstance(value, str | int) or not str(value).strip():
        raise _Refused(f"its .json has no {key!r} that is a text or a whole number")
    return str(value)


def _contents(
    parts: Sequence[tuple[str, int, int]], contents: dict[tuple[int, int], bytes]
) -> Iterator[tuple[str, bytes]]:
    for ending, offset, size in parts:
        if (offset, size) in contents:
            yield ending, contents[offset, size]
