"""Image files below folders, each folder once, whatever links lead to it."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class FolderFiles:
    """What lies below one folder. images, others: paths in order. repeated: links left out → where they lead."""

    images: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    repeated: dict[str, str] = field(default_factory=dict)


def read_folders(root: Path, tops: Sequence[Path], suffixes: Container[str]) -> dict[Path, FolderFiles]:
    """The files below each of the folders `tops` of `root`, in their order; hidden ones are passed over.

    Links to folders are followed, but for those to a folder that is read already, or to one that holds `root`: each
    image would come twice, under two classes. So folders that are none are read first, whatever links are called.
    """
    reading, above = _Reading(suffixes), {str(each) for each in (root.resolve(), *root.resolve().parents)}
    found = {top: FolderFiles() for top in tops}
    links = [(str(top), found[top]) for top in tops if top.is_symlink() and top != root]
    for top in tops:
        if not top.is_symlink() or top == root:
            reading.read(str(top), found[top])
    reading.links[:0] = links
    while reading.links:
        link, files = reading.links.pop(0)
        if os.path.realpath(link) in above:
            files.repeated[link] = os.path.realpath(link)
        else:
            reading.read(link, files)
    return found


def is_hidden(name: str) -> bool:
    return name.startswith((".", "__")) or name in {"Thumbs.db", "desktop.ini"}


class _Reading:
    """links: to folders, met on the way and not followed yet, with where their files belong."""

    def __init__(self, suffixes: Container[str]) -> None:
        self._suffixes, self._known = suffixes, set[str]()  # the resolved paths of folders that were read
        self.links: list[tuple[str, FolderFiles]] = []

    def read(self, top: str, into: FolderFiles) -> None:
        for folder, folders, files in os.walk(top):
            real = os.path.realpath(folder)
            if real in self._known:
                into.repeated[folder] = real
                folders.clear()
                continue
            self._known.add(real)
            seen = sorted(name for name in folders if not is_hidden(name))
            linked = {name for name in seen if os.path.islink(os.path.join(folder, name))}
            folders[:] = [name for name in seen if name not in linked]
            self.links += [(os.path.join(folder, name), into) for name in seen if name in linked]
            for name in sorted(name for name in files if not is_hidden(name)):
                is_image = os.path.splitext(name)[1].lower() in self._suffixes
                (into.images if is_image else into.others).append(os.path.join(folder, name))
