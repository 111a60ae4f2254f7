"""Objects below an address in a store, through obstore: listed, read in ranges, uploaded in parts, put conditionally.

Each request is repeated by obstore where that is safe, and each verb here a few times more, with growing pauses; then
StoreError says what the store answered. Credentials are read from the environment by obstore, and are taken out of
every message.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.errors import RunError, problem

T = TypeVar("T")
PART = 8 * 2**20  # bytes of a range or a part; of a file, at most PARALLEL of them are in memory
PARALLEL = 4
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each repetition of a verb
_RETRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=60)}  # of a request, within a verb
_CLIENT = {"timeout": "120s", "connect_timeout": "10s"}
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|SAS|CREDENTIAL", re.IGNORECASE)
_SIGNED = re.compile(r"((?:X-Amz-|X-Goog-)?(?:Signature|Credential|Security-Token)|sig|AWSAccessKeyId)=[^&\s\"']+")
_ENDPOINTS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_BASE_URL",
)
_LASTING = re.compile(r"status code: (400|401|403|404)\b|NoSuchBucket")
LEAST_SECRET = 6  # characters of an environment variable that is taken out of messages


class StoreError(RunError):
    """The store refused or did not answer. passing: whether another attempt may succeed."""

    def __init__(self, message: str, passing: bool = True) -> None:
        super().__init__(message)
        self.passing = passing


class NotThere(StoreError):
    """There is no such object, or no such bucket."""


class Conflict(StoreError):
    """A conditional put was refused: another writer was there first."""


@dataclass(frozen=True)
class Entry:
    """An object. path: from the store's address on. tag: changes with the contents, where the store has such tags.
    modified: seconds since 1970 by the store's clock."""

    path: str
    bytes: int
    tag: str | None
    modified: float


Version = Mapping[str, str]  # of an object, as a conditional put takes it


class ObjectStore:
    """The objects below an address. Methods raise StoreError."""

    def __init__(self, address: str, pauses: Sequence[float] = PAUSES) -> None:
        """Raises UserError where obstore is not installed, or the address or the environment is no use to it."""
        self.address, self._pauses = address.rstrip("/"), pauses
        self.has_ranges = not address.startswith(("http://", "https://"))  # not each server has them
        self._obstore: Any = _library()
        client = dict(_CLIENT)
        if address.startswith("http://") or any(os.environ.get(n, "").startswith("http://") for n in _ENDPOINTS):
            client["allow_http"] = True  # type: ignore[assignment]  # the user's own choice
        stores: Any = importlib.import_module("obstore.store")
        try:
            self._store = stores.from_url(self.address, client_options=client, retry_config=_RETRIES)
        except Exception as error:  # obstore has no common class for a wrong address and a missing variable
            fix = "correct the address; credentials come from the environment (docs/how-to/object-stores.md)"
            raise problem(self.address, scrubbed(_first_line(error)), fix) from None

    def __str__(self) -> str:
        return self.address

    # --- reading -----------------------------------------------------------------------------------------------------

    def entries(self, prefix: str = "") -> list[Entry]:
        """Lists all objects below a prefix that ends a name, at any depth, by name."""
        found = self._try("list", prefix, lambda: self._store.list(prefix or None).collect())
        return sorted((_entry(each) for each in found), key=lambda each: each.path)

    def is_empty(self) -> bool:
        """Returns whether there is no object below the address."""
        return not self._try("list", "", lambda: [*next(iter(self._store.list(chunk_size=1)), [])])

    def entry(self, path: str) -> Entry | None:
        """Returns the object of this name, or None."""
        try:
            return _entry(self._try("look up", path, lambda: self._store.head(path)))
        except NotThere:
            return None

    def read(self, path: str) -> tuple[bytes, Version]:
        """Returns the contents of a small object, and its version."""

        def get() -> tuple[bytes, Version]:
            found = self._store.get(path)
            return bytes(found.bytes()), _version(found.meta)

        return self._try("read", path, get)

    def stream(self, path: str) -> Iterator[memoryview]:
        """Yields a whole object in order, for servers that have no ranges. An interrupted one is not gone on with."""
        try:
            for each in self._try("read", path, lambda: self._store.get(path)).stream(PART):
                yield memoryview(each)
        except Exception as error:
            raise error if isinstance(error, StoreError) else self._error("read", path, error) from None

    def read_range(self, path: str, start: int, stop: int, tag: str | None = None) -> memoryview:
        """Returns bytes start to stop - 1. tag: that the object must still have."""
        options: dict[str, Any] = {"range": (start, stop)}
        if tag is not None:
            options["if_match"] = tag

        def get() -> memoryview:
            found = memoryview(self._store.get(path, options=options).bytes())
            if len(found) != stop - start:
                raise OSError(f"{len(found)} of {stop - start} bytes came")
            return found

        return self._try("read", path, get)

    # --- writing -----------------------------------------------------------------------------------------------------

    def upload(self, path: str, file: Path, moved: Callable[[int], None] = lambda _: None) -> None:
        """Puts a file, in parts that are read from it as they are sent; replaces an object of this name at once.

        moved: called with the bytes of each part.
        """
        before = self.entry(path)

        def put() -> None:
            try:
                content = file if file.stat().st_size <= PART else _parts(file, moved)
                self._store.put(path, content, chunk_size=PART, max_concurrency=PARALLEL)
            except Exception as error:
                # cutting off the answer to its completion leaves the upload done, and aborting it fails
                now = self.entry(path) if "NoSuchUpload" in str(error) else None
                if now is None or now == before or now.bytes != file.stat().st_size:
                    raise

        self._try("write", path, put)

    def put_if(self, path: str, data: bytes, version: Version | None) -> Version:
        """Puts a small object if it still has this version (None: if there is none), and returns the new version.

        Raises Conflict if it has another. Where the answer to a put was lost, the contents decide whether it was done.
        """
        mode: Any = "create" if version is None else dict(version)
        try:
            done = self._try("write", path, lambda: self._store.put(path, data, mode=mode, use_multipart=False))
            return _version(done)
        except Conflict:
            there, of_it = self.read(path)
            if there == data:
                return of_it
            raise

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes objects; those that are gone already do not matter."""
        for path in paths:
            try:
                self._try("delete", path, lambda path=path: self._store.delete(path))  # type: ignore[misc]
            except NotThere:
                continue

    def _try(self, what: str, path: str, do: Callable[[], T]) -> T:
        for pause in (*self._pauses, None):
            try:
                return do()
            except Exception as error:  # each kind of failure that obstore and the network have
                found = self._error(what, path, error)
                if pause is None or not found.passing:
                    raise found from None
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _error(self, what: str, path: str, error: Exception) -> StoreError:
        kinds: Any = importlib.import_module("obstore.exceptions")
        place = f"{self.address}/{path}".rstrip("/")
        why = f"cannot {what} {place}: {scrubbed(_first_line(error))}"
        if "NoSuchUpload" in why:  # a cut answer to its completion: whether it was done shows when it is done again
            return StoreError(why)
        if isinstance(error, kinds.NotFoundError | FileNotFoundError):
            return NotThere(why, passing=False)
        if isinstance(error, kinds.AlreadyExistsError | kinds.PreconditionError):
            return Conflict(why, passing=False)
        refused = (kinds.PermissionDeniedError, kinds.UnauthenticatedError, kinds.InvalidPathError)
        lasting = isinstance(error, (*refused, kinds.NotSupportedError, TypeError, ValueError))
        return StoreError(why, passing=not lasting and not _LASTING.search(why))


def _parts(file: Path, moved: Callable[[int], None]) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while part := opened.read(PART):
            yield part
            moved(len(part))


def scrubbed(text: str) -> str:
    """Returns a message without the values of the environment's credentials and without signatures of addresses."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= LEAST_SECRET:
            text = text.replace(value, f"<{name}>")
    return _SIGNED.sub(r"\1=<...>", text)


def _library() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        fix = "pip install 'drivetrain[store]'"
        raise problem("obstore", "addresses in object stores need the package obstore", fix) from None


def _entry(found: Mapping[str, Any]) -> Entry:
    tag = found.get("e_tag")
    if tag and not tag.startswith(('"', "W/")):  # Azure's listings leave the quotes out, and If-Match has to have them
        tag = f'"{tag}"'
    return Entry(found["path"], found["size"], tag, found["last_modified"].timestamp())


def _version(found: Mapping[str, Any]) -> Version:
    return {name: found[name] for name in ("e_tag", "version") if found.get(name) is not None}


def _first_line(error: Exception) -> str:
    """Returns the message without the answer's XML and the debug output that obstore appends."""
    text = str(error).strip() or type(error).__name__
    code = re.search(r"<Code>([^<]*)</Code>(?:.*?<Message>([^<]*)</Message>)?", text, re.DOTALL)
    line = re.sub(r"\s+", " ", text.split("\nDebug source")[0].split("<?xml")[0]).strip().rstrip(":")[:400]
    return f"{line}: {code[1]}{f' ({code[2]})' if code[2] else ''}" if code else line
