"""Native extensions that torch builds at their first use: where they lie, and what interrupted builds leave."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from drivetrain.runtime.user_cache import user_cache


def root() -> Path:
    """Returns the folder of all extensions of this user (torch.utils.cpp_extension: TORCH_EXTENSIONS_DIR, or one in its
    cache)."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    return user_cache() / "torch_extensions"


def build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def folders() -> Iterator[Path]:
    """Yields every folder that holds a build, finished or not."""
    yield from sorted(script.parent for script in root().rglob("build.ninja"))


def is_built(folder: Path) -> bool:
    return not (folder / "lock").exists() and any(folder.glob("*.so"))


def is_building(folder: Path, patience: float) -> bool:
    """Returns whether a build works there: a process of this machine, or (a shared disk) changes within `patience`
    s."""
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder:
                return True
        except (psutil.Error, OSError):
            continue
    newest = max((path.stat().st_mtime for path in folder.glob("*")), default=0.0)
    return time.time() - newest < patience
