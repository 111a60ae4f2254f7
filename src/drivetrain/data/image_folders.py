"""Finds image files below folders, each folder once, even if several links lead to it."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FolderRead:
    """One folder: names of its files, sorted. top: the number of the top folder above it, by which classes are ordered.
    repeated: the target of a link that is left out."""

    top: int
    folder: str
    images: Sequence[str] = ()
    others: Sequence[str] = ()
    repeated: str | None = None


def read_folders(root: Path, tops: Sequence[Path], suffixes: Container[str]) -> Iterator[FolderRead]:
    """Yields the folders below `tops`, which lie in `root` or are it; hidden ones are passed over.

    Links to folders are followed, except those to a folder that was read already, or to one that holds `root`: each
    image would come twice, under two classes. So real folders are read first, whatever the names of links; a stable
    sort by `top` gives the order of the classes.
    """
    reading, above = _Reading(suffixes), {str(each) for each in (root.resolve(), *root.resolve().parents)}
    links = [(str(top), number) for number, top in enumerate(tops) if top.is_symlink() and top != root]
    for number, top in enumerate(tops):
        if not top.is_symlink() or top == root:
            yield from reading.read(str(top), number)
    reading.links[:0] = links
    while reading.links:
        link, number = reading.links.pop(0)
        if os.path.realpath(link) in above:
            yield FolderRead(number, link, repeated=os.path.realpath(link))
        else:
            yield from reading.read(link, number)


def is_hidden(name: str) -> bool:
    return name.startswith((".", "__")) or name in {"Thumbs.db", "desktop.ini"}


class _Reading:
    """The state of a reading. links: to folders, found and not followed yet, with the top folder that their files
    belong to."""

    def __init__(self, suffixes: Container[str]) -> None:
        self._suffixes, self._known = suffixes, set[str]()  # the resolved paths of folders that were read
        self.links: list[tuple[str, int]] = []

    def read(self, start: str, top: int) -> Iterator[FolderRead]:
        for folder, folders, files in os.walk(start):
            real = os.path.realpath(folder)
            if real in self._known:
                folders.clear()
                yield FolderRead(top, folder, repeated=real)
                continue
            self._known.add(real)
            seen = sorted(name for name in folders if not is_hidden(name))
            linked = {name for name in seen if os.path.islink(os.path.join(folder, name))}
            folders[:] = [name for name in seen if name not in linked]
            self.links += [(os.path.join(folder, name), top) for name in seen if name in linked]
            images: list[str] = []
            others: list[str] = []
            for name in sorted(name for name in files if not is_hidden(name)):
                is_image = os.path.splitext(name)[1].lower() in self._suffixes
                (images if is_image else others).append(name)
            yield FolderRead(top, folder, images, others)
