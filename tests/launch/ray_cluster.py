"""A Ray cluster of three nodes of one core each, all on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

SIZE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
OFF = "RAY_USAGE_STATS_ENABLED"


@contextlib.contextmanager
def three_nodes() -> Iterator[Any]:
    """Yields the cluster. `spares` are the nodes beside its head."""
    from ray.cluster_utils import Cluster

    before = os.environ.get(OFF)
    os.environ[OFF] = "0"
    found = Cluster(initialize_head=True, head_node_args={**SIZE, "include_dashboard": False})
    found.spares = [found.add_node(**SIZE) for _ in range(2)]
    try:
        yield found
    finally:
        found.shutdown()
        os.environ.pop(OFF) if before is None else os.environ.update({OFF: before})
