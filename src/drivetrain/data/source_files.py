"""Identifies a data file's content without reading it again: a digest is kept by size, time and sampled blocks.

An edit is found by the time of the file's last change, which every writer moves, or by the sampled blocks. One that
keeps the length, lies between the samples of a file over 4 MiB, and sets the time back is not found.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from drivetrain.data.array_store import replaced_when_whole, sampled_digest
from drivetrain.errors import problem

AT_ONCE = 1 << 22


class SourceFile:
    """A file as it was when it was opened here."""

    def __init__(self, file: Path, field: str) -> None:
        self.file, self._field, self._state = file, field, _state(file)

    def digest(self, root: Path) -> str:
        """Returns the digest of all its bytes; a file that is known under `root` is not read again."""
        kept = self.kept_digest(root)
        if kept is not None:
            return kept
        found = self.read_digest()
        with suppress(OSError):  # the store's own warning names the folder
            root.mkdir(parents=True, exist_ok=True)
            with replaced_when_whole(self._kept(root)) as aside:
                aside.write_text(json.dumps({"path": self._state[0], "digest": found}), encoding="utf-8")
        return found

    def kept_digest(self, root: Path) -> str | None:
        """Returns the digest that is recorded for a file of this path, size, time and sampled blocks."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self._kept(root).read_text(encoding="utf-8"))["digest"])
        return None

    def read_digest(self) -> str:
        """Returns the digest of all its bytes, read now."""
        found = whole_digest(self.file)
        self.check_unchanged()
        return found

    def forget(self, root: Path) -> None:
        """Removes the record of the file, so that the next start reads it."""
        self._kept(root).unlink(missing_ok=True)

    def _kept(self, root: Path) -> Path:
        name = blake2b(json.dumps([*self._state, sampled_digest(self.file)]).encode(), digest_size=20).hexdigest()
        return root / f"source-{name}.json"

    def check_unchanged(self) -> None:
        """Raises UserError if the file was written to, replaced or removed since."""
        try:
            same = _state(self.file) == self._state
        except OSError:
            raise problem(self._field, f"{self.file} vanished while it was read", "put it back") from None
        if not same:
            raise problem(self._field, f"{self.file} changed while it was read", "start again when it is written")


def whole_digest(file: Path) -> str:
    digest = blake2b(digest_size=20)
    with file.open("rb") as opened:
        while part := opened.read(AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def _state(file: Path) -> tuple[str, int, int]:
    found = file.stat()
    return str(file.resolve()), found.st_size, found.st_mtime_ns
