"""Reads from the command line which data to predict for."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from drivetrain.errors import problem

STDIN = "-"


def asked_for(data: str | None, texts: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the file or folder, and the texts that stand in its place. Raises UserError for both, and for an empty
    stdin."""
    if data is not None and texts:
        raise problem("--text", f"--data ({data}) was given as well", "give one of the two")
    if data != STDIN:
        return data, list(texts)
    try:
        text = io.StringIO(sys.stdin.buffer.read().decode("utf-8-sig"), newline=None)
        lines = [line.rstrip("\n") for line in text if line.strip()]
    except UnicodeDecodeError as error:
        raise problem("--data -", f"stdin is not UTF-8: {error.reason} at byte {error.start}", "convert it") from None
    if not lines:
        raise problem("--data -", "stdin holds no text", "give a text a line")
    return None, lines
