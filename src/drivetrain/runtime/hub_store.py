"""Files of a repository on the Hugging Face hub, read as a store: hf://OWNER/NAME, hf://datasets/OWNER/NAME, each with
@REVISION where it is not the newest. HF_TOKEN and HF_ENDPOINT are read from the environment by huggingface_hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.errors import problem
from drivetrain.runtime.object_store import PART, Entry, NotThere, StoreError, scrubbed

T = TypeVar("T")
KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}


def repository_of(rest: str) -> str:
    """Returns the part of an address behind hf:// that names the repository. Raises UserError if it names none."""
    parts = rest.split("/")
    count = 3 if parts[0] in KINDS else 2
    if len(parts) < count or not all(parts[:count]):
        raise problem(f"hf://{rest}", "it names no repository", "write hf://OWNER/NAME or hf://datasets/OWNER/NAME")
    return "/".join(parts[:count])


class HubStore:
    """The files of a repository. Methods raise StoreError."""

    def __init__(self, address: str) -> None:
        self.address = address
        kind, _, name = address.removeprefix("hf://").rpartition("/")
        kind, owner = kind.split("/") if "/" in kind else ("models", kind)
        name, _, revision = name.partition("@")
        self._of: dict[str, Any] = {
            "repo_id": f"{owner}/{name}",
            "repo_type": KINDS[kind],
            "revision": revision or None,
        }

    def __str__(self) -> str:
        return self.address

    def entry(self, path: str) -> Entry | None:
        from huggingface_hub import HfApi

        found = self._try("look up", path, lambda: HfApi().get_paths_info(paths=[path], **self._of))
        return next((_entry(each) for each in found if hasattr(each, "size")), None)

    def entries(self, prefix: str = "") -> list[Entry]:
        from huggingface_hub import HfApi

        def listed() -> list[Any]:
            return [*HfApi().list_repo_tree(path_in_repo=prefix or None, recursive=True, **self._of)]

        found = self._try("list", prefix, listed)
        return sorted((_entry(each) for each in found if hasattr(each, "size")), key=lambda each: each.path)

    def stream(self, path: str) -> Iterator[memoryview]:
        """Yields a file's contents, from a copy that huggingface_hub makes for as long."""
        from huggingface_hub import hf_hub_download

        with tempfile.TemporaryDirectory(prefix="drivetrain-hub-") as folder:
            copy = self._try("read", path, lambda: hf_hub_download(filename=path, local_dir=folder, **self._of))
            with Path(copy).open("rb") as opened:
                while part := opened.read(PART):
                    yield memoryview(part)

    def _try(self, what: str, path: str, do: Callable[[], T]) -> T:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

        try:
            return do()  # huggingface_hub repeats requests itself
        except Exception as error:  # network errors have no class in common
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            why = f"cannot {what} {self.address}/{path}: {scrubbed(line)[:400]}"
            if isinstance(error, EntryNotFoundError | RepositoryNotFoundError):
                raise NotThere(why, passing=False) from None
            raise StoreError(why, passing=not isinstance(error, HfHubHTTPError)) from None


def _entry(found: Any) -> Entry:
    return Entry(found.path, found.size, found.blob_id, 0.0)
