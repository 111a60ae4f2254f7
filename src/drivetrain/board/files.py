"""The file picker: folders that the board was given, nothing outside them and nothing hidden in them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from drivetrain.board.places import Places
from drivetrain.board.runs import NAME
from drivetrain.errors import problem
from drivetrain.web.refusals import Refusal

MOST_LISTED = 2000
KEPT_SECONDS = 7 * 24 * 3600  # of an upload that no entry took into its own folder
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def listed(places: Places, asked: str | None) -> dict[str, Any]:
    """Returns what lies in a folder. asked: None for the first of the roots. Raises Refusal for one outside them."""
    roots = places.roots
    if not roots:
        raise Refusal(404, "this board shows no folders: --data FOLDER gives it one", "no_folder")
    folder = roots[0] if asked is None else allowed(places, asked)
    if not folder.is_dir():
        raise Refusal(404, "that is no folder", "no_folder", "path")
    entries = []
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if not each.name.startswith(".") and _is_within(Path(each.path), places):
                entries.append(_entry(each))
    entries.sort(key=lambda each: (not each["folder"], each["name"].lower()))
    parent = folder.parent if folder not in roots and places.holds(folder.parent) else None
    return {
        "path": str(folder),
        "parent": None if parent is None else str(parent),
        "roots": [str(each) for each in roots],
        "entries": entries[:MOST_LISTED],
        "cut": len(entries) > MOST_LISTED,
    }


def allowed(places: Places, asked: str) -> Path:
    """Returns a path that requests may name, with links followed. Raises Refusal (404) for any other, there or not."""
    if "\0" not in asked and len(asked) < 4000:
        with contextlib.suppress(OSError, RuntimeError):
            place = Path(asked).resolve(strict=True)
            if places.holds(place):
                return place
    raise Refusal(404, "there is no such file in the folders of this board", "no_file", "path")


def added(places: Places, asked: str, name: str, content: bytes) -> dict[str, Any]:
    """Keeps a file that a user sent in a folder that requests may name, whole and under its name; none is replaced."""
    folder = allowed(places, asked)
    _check(name, content)
    aside = folder / f".{secrets.token_hex(10)}"
    try:
        aside.write_bytes(content)
        os.link(aside, folder / name)
    except FileExistsError:
        raise Refusal(409, "there is a file of that name: give yours another one", "exists", "name") from None
    except (PermissionError, NotADirectoryError):
        raise Refusal(403, "the board may not write into that folder", "not_writable", "folder") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return {"path": str(folder / name), "name": name, "bytes": len(content)}


def _check(name: str, content: bytes) -> None:
    """Raises UserError for what is no name of a file, and for an empty one."""
    if NAME.fullmatch(name) is None:
        raise problem("name", "that is no name of a file", "give a name without folders")
    if not content:
        raise problem("file", "it is empty", "choose another file")


def _is_within(path: Path, places: Places) -> bool:
    with contextlib.suppress(OSError, RuntimeError):
        return places.holds(path.resolve(strict=True))
    return False


def _entry(found: os.DirEntry[str]) -> dict[str, Any]:
    is_folder = found.is_dir()
    size = None if is_folder else found.stat().st_size
    return {"name": found.name, "path": found.path, "folder": is_folder, "bytes": size}


class Uploads:
    """Files that users sent, a folder for each upload. folder: of all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for each in folder.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - each.stat().st_mtime > KEPT_SECONDS:
                    shutil.rmtree(each, ignore_errors=True)

    def add(self, owner: str, name: str, content: bytes, beside: str | None) -> dict[str, Any]:
        """Keeps a file. beside: the upload of the same user that it joins, as pictures of one folder do."""
        _check(name, content)
        own = self._of(owner, beside) if beside is not None else None
        if own is None:
            own = self._folder / f"{secrets.token_hex(10)}"
            (own / "files").mkdir(parents=True)
            (own / "owner").write_text(owner, encoding="utf-8")
        (own / "files" / name).write_bytes(content)
        return {"id": own.name, "name": name, "bytes": len(content)}

    def place(self, owner: str, upload: str) -> Path:
        """Returns the file of an upload, or the folder of one that is pictures. Raises Refusal (404)."""
        files = sorted((self._of(owner, upload) / "files").iterdir())
        is_file = len(files) == 1 and files[0].suffix.lower() not in PICTURES
        return files[0] if is_file else files[0].parent

    def _of(self, owner: str, upload: str) -> Path:
        own = self._folder / upload
        if upload.isalnum():
            with contextlib.suppress(OSError):
                if (own / "owner").read_text(encoding="utf-8") == owner:
                    return own
        raise Refusal(404, "there is no such upload of yours", "no_upload", "upload")
