"""Paths that may one day be elsewhere, such as in an object store. Today a location is a path of this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

# one slash is left where a Path was made of an address; a scheme has two letters at least, unlike a Windows drive
ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+")


def why_not_here(location: str) -> str | None:
    """Returns why a location cannot be read and written, with what to do instead; None for a path of this machine."""
    found = ADDRESS.match(location)
    if found is None:
        return None
    scheme = found[1].lower()
    if scheme == "file":
        return "it is an address; give the path alone, without file://"
    return (
        f"it is an address ({scheme}://), and this kind of location is not supported yet. Give a folder or file of "
        "this machine: mount the store (rclone mount, s3fs, gcsfuse), or copy it before and after the run"
    )


def _here(location: Path) -> Path:
    why = why_not_here(str(location))
    if why is not None:
        raise ValueError(f"input should be a path; {why}")
    return location


Location = Annotated[Path, AfterValidator(_here)]
