"""Paths of the run file, and addresses in object stores that stand in their place.

An address is s3://, gs://, az:// or abfs://BUCKET/KEY, hf://OWNER/NAME/FILE, or http(s)://HOST/FILE. Its credentials
come from the environment; an address that holds some is refused, since a run file is copied and shown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, PlainSerializer

# one slash is left where a Path was made of an address; a scheme has two letters at least, unlike a Windows drive
ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+")
WRITABLE = ("s3", "gs", "az", "abfs", "abfss")
READABLE = (*WRITABLE, "hf", "http", "https")
_SIGNED = re.compile(r"[?&](sig|signature|awsaccesskeyid|(x-amz|x-goog)-[a-z-]+)=", re.IGNORECASE)
# user and password; the container before the account of abfs://CONTAINER@ACCOUNT is none
_USER = re.compile(r"(?!abfss?://[^/@:\s]*@)\b([a-zA-Z][a-zA-Z0-9+.-]*:/+)[^/\s'\"]*@")
_QUERY = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+:/+[^\s'\"?]*[?&][^\s'\"=&]+=)[^\s'\"]*")
_LISTED = "s3://, gs://, az://, abfs://, hf:// or http(s)://"


def store_address(location: str | Path) -> str | None:
    """Returns the address in a store, with both slashes; None for a path of this machine and for other schemes."""
    found = ADDRESS.match(str(location))
    if found is None or found[1].lower() not in READABLE:
        return None
    return f"{found[1].lower()}://{str(location)[found.end() :].rstrip('/')}"


def why_not_here(location: str) -> str | None:
    """Returns why a location is no path of this machine, with what to do instead; None for a path."""
    found = ADDRESS.match(location)
    if found is None:
        return None
    if found[1].lower() == "file":
        return "it is an address; give the path alone, without file://"
    return (
        f"it is an address ({found[1].lower()}://), and this has to be a folder or file of this machine. Data and "
        "models may lie in a store; a run is mirrored to one by mirror: s3://BUCKET/FOLDER"
    )


def why_not_readable(location: str) -> str | None:
    """Returns why a location can be neither a path of this machine nor read from a store; None if it can."""
    address = store_address(location)
    if address is None:
        found = ADDRESS.match(location)
        if found is None or found[1].lower() == "file":
            return why_not_here(location)
        return f"addresses of this kind ({found[1].lower()}://) cannot be read; give {_LISTED}, or a path"
    return _wrong_with(address)


def why_not_writable(location: str) -> str | None:
    """Returns why a run cannot be mirrored to a location; None if it can."""
    address = store_address(location)
    if address is None or address.partition(":")[0] not in WRITABLE:
        return "a run is mirrored to s3://, gs://, az:// or abfs://BUCKET/FOLDER"
    if set("*?[]{}") & set(address):
        return "it has a wildcard or braces, and names one folder"
    return _wrong_with(address)


def without_secrets(text: str) -> str:
    """Returns a message without the users, passwords and values of queries that addresses in it hold."""
    return _QUERY.sub(r"\1<...>", _USER.sub(r"\1<...>@", text))


def _wrong_with(address: str) -> str | None:
    try:
        parts = urlsplit(address)
    except ValueError:
        return "the address is malformed"
    if parts.password or (parts.username and parts.scheme not in ("abfs", "abfss")):
        return "it holds a user or password; credentials come from the environment (docs/how-to/object-stores.md)"
    if _SIGNED.search(address) or (parts.scheme in ("http", "https") and parts.query):
        return "an address with a query (?...) cannot be read, and may hold credentials; give one without"
    if not parts.netloc:
        return "it names no bucket or host"
    if {".", ".."} & {*re.split(r"[/{},]", address.partition("://")[2])}:
        return "it has . or .. among its names"
    return None


def _here(location: Path) -> Path:
    why = why_not_here(str(location))
    if why is not None:
        raise ValueError(f"input should be a path; {why}")
    return location


def _readable(location: Path) -> Path:
    why = why_not_readable(str(location))
    if why is not None:
        raise ValueError(f"input should be a path or an address in a store; {why}")
    return location


def _mirror(location: str) -> str:
    why = why_not_writable(location)
    if why is not None:
        raise ValueError(f"input should be an address in a store; {why}")
    return store_address(location) or location


def _written(location: Path) -> str:
    return store_address(location) or str(location)


Location = Annotated[Path, AfterValidator(_here)]  # of this machine alone
Source = Annotated[Path, AfterValidator(_readable), PlainSerializer(_written, str, when_used="json")]
Mirror = Annotated[str, AfterValidator(_mirror)]
