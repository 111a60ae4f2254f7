"""Content that rarely changes, compressed once, and not sent again to a browser that has it.

Only what holds no secret is compressed: the length of a compressed answer can give its content away (BREACH).
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response

from drivetrain.errors import clipped
from drivetrain.web.refusals import Refusal

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True)
class Content:
    """Bytes with their type, compressed too, and a tag that changes when they do."""

    plain: bytes
    packed: bytes
    kind: str
    tag: str

    @classmethod
    def of(cls, plain: bytes, kind: str) -> Content:
        tag = f'"{hashlib.sha256(plain).hexdigest()[:24]}"'
        return cls(plain, gzip.compress(plain, 9, mtime=0), kind, tag)

    def answer(self, request: Request) -> Response:
        """Returns the content, or 304 to a browser that has it."""
        headers = {"etag": self.tag, "cache-control": "private, no-cache", "vary": "accept-encoding"}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", "") and len(self.packed) < len(self.plain):
            headers["content-encoding"] = "gzip"
            return Response(self.packed, media_type=self.kind, headers=headers)
        return Response(self.plain, media_type=self.kind, headers=headers)


class PageFiles:
    """The files of the page. A changed file is read again."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder.resolve()
        self._kept: dict[Path, tuple[int, Content]] = {}

    def answer(self, name: str, request: Request) -> Response:
        """Raises Refusal (404) for what is no file of the page."""
        try:
            place = (self._folder / name).resolve(strict=True)
            changed = place.stat().st_mtime_ns
        except (OSError, ValueError):
            raise self._missing(name) from None
        if not place.is_relative_to(self._folder) or not place.is_file() or place.suffix not in TYPES:
            raise self._missing(name)
        kept = self._kept.get(place)
        if kept is None or kept[0] != changed:
            kept = self._kept[place] = (changed, Content.of(place.read_bytes(), TYPES[place.suffix]))
        return kept[1].answer(request)

    def _missing(self, name: str) -> Refusal:
        return Refusal(404, f"there is no {clipped(name, 80)} here", "no_file")
