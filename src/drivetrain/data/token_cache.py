"""Arrays made of texts by a tokenizer, once: cached by content, in files that no reader sees half-written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from drivetrain.data.byte_lengths import is_of_transformers

FORMAT = 4

Arrays = Mapping[str, np.ndarray]


def cached(
    folder: Path | None, key: str, make: Callable[[], Arrays], check: Callable[[Arrays], bool]
) -> tuple[Arrays, str | None]:
    """Returns the arrays of that key, from the cache if they are there and `check` finds them complete, else made and
    written.

    If several processes need the same, ranks or runs, one makes it while the others wait for its file: outside of any
    collective, so that hours of tokenising run into no process group's timeout, and once on each host.

    folder: None for drivetrain's own in the user's cache. Returns a warning too if the cache cannot be used.
    """
    file = (folder or _default_folder()) / f"{key}.npz"
    found, damage = _read(file, check)
    if found is not None:
        return found, None
    with _alone(file.with_suffix(".lock")):
        found, _ = _read(file, check)
        if found is not None:
            return found, None
        arrays = make()
        return arrays, _write(file, arrays) or damage


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Holds a lock, which the kernel releases when its process ends in any way. Works without one where the disk has no
    locks."""
    lock = FileLock(file)
    with suppress(OSError, NotImplementedError):  # _write will tell of the folder
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        if lock.is_locked:
            file.unlink(missing_ok=True)  # a process that waits for this one still finds the result
            lock.release()


def content_key(header: Any, tokenizer: Any, texts: Iterable[str]) -> str:
    """Returns the key of everything that decides the arrays. header: JSON-able options of their maker."""
    import tokenizers
    import transformers

    versions = [tokenizers.__version__, transformers.__version__, version("jinja2")]
    digest = hashlib.blake2b(digest_size=20)
    digest.update(json.dumps([FORMAT, versions, header, _identity(tokenizer)]).encode())
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))  # or ["ab", "c"] would be ["a", "bc"]
        digest.update(encoded)
    return digest.hexdigest()


def _identity(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer
        return f"{type(tokenizer).__name__} {sorted(tokenizer.get_vocab().items())} {tokenizer.init_kwargs}"
    content = json.loads(backend.to_str())
    # every call leaves its own here: with them the same texts would have another key the second time
    content.pop("truncation", None)
    content.pop("padding", None)
    kind = type(tokenizer)  # a class of the user's may make other ids with the same vocabulary
    own_code = [] if is_of_transformers(tokenizer) else [f"{kind.__module__}.{kind.__qualname__}"]
    return json.dumps([content, bool(getattr(tokenizer, "split_special_tokens", False)), *own_code])


def _default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "drivetrain" / "tokenised"


def _read(file: Path, check: Callable[[Arrays], bool]) -> tuple[Arrays | None, str | None]:
    """Returns (arrays, None), or (None, None) if they are missing, or (None, what is wrong with them)."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as held:  # checks a CRC of each array
            arrays = dict(held)
        if not check(arrays):
            raise ValueError("its parts do not fit together")
    except FileNotFoundError:
        return None, None
    except Exception as error:  # damage shows itself as nearly anything
        return None, f"the token cache {file} was damaged ({type(error).__name__}) and is made again"
    return arrays, None


def _write(file: Path, arrays: Arrays) -> str | None:
    """Writes aside, then renames. Returns a warning if that fails."""
    aside = file.with_suffix(f".{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as opened:
                np.savez(opened, allow_pickle=False, **arrays)
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        return f"tokens could not be cached in {file.parent} ({error.strerror}); they are made again next time"
    return None
