"""A server that answers in the model's place while it learns from rewards, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from drivetrain.config.adapter import Adapter
from drivetrain.config.base import Frozen, doc
from drivetrain.errors import Problem, shown

FOLDER = "rollout-weights"  # in the run's folder, where none is given


def as_server(given: Any) -> Any:
    return {"url": given} if isinstance(given, str) else given


class RolloutServer(Frozen):
    """vLLM's server: it gets the weights before each batch of answers, and draws them."""

    url: str = doc("Address of vLLM's server: http://127.0.0.1:8000")
    weights: str | None = doc(
        "Folder that the run and the server both see, through which weights go: /dev/shm/policy on one machine; left "
        "out, one in the run's folder",
        None,
    )
    key: str | None = doc("Name of the environment variable that holds the server's API key", None)
    time_limit: float = doc("Seconds after which a server that does not answer ends the run", 600, gt=0)
    at_once: int = doc("Answers that each rank asks for at once", 64, gt=0)


def server_problems(server: RolloutServer, field: str, adapters: Sequence[Adapter] | None) -> Iterator[Problem]:
    """Yields what a server cannot do, and an address that is none."""
    try:
        parts = urlsplit(server.url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65535, a broken IPv6 address
        is_address = False
    if not is_address or any(each.isspace() for each in server.url):
        yield Problem(f"{field}.url", f"{shown(server.url)} is no address", "give http://HOST:PORT")
    elif parts.username is not None:
        yield Problem(f"{field}.url", "it has a user's name, which is not sent", "name the key's variable in key")
    trained = [each for each in adapters or () if each.trained]
    if adapters and (len(adapters) > 1 or len(trained) != 1):
        yield Problem(field, "vLLM computes with one adapter", "train one adapter, or leave the server out")
    for each in adapters or ():
        if each.method != "lora" or each.dora or each.saved_as_dora or each.train_also:
            what = "DoRA" if each.dora or each.saved_as_dora else "train_also" if each.train_also else each.method
            yield Problem(field, f"vLLM loads plain LoRA while it runs, and not {what}", "leave the server out")
