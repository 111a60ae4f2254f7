"""Remarks on a stream before training."""

from __future__ import annotations

from typing import Any


def travel_note(stream: Any, buffer: int) -> str:
    """States how far rows are from their places, measured on the stream's first block."""
    moved, shards = stream.rows.travel(), stream.rows.num_shards
    order = f"its {shards:,} shards are shuffled, and then " if shards > 1 else ""
    more = "" if shards > 1 else "; it is one shard, so rows that lie together are trained on together"
    return (
        f"{stream.title} is a stream: {order}a row moves up to {buffer - 1:,} places (workload.data.stream_buffer; "
        f"measured on the first block: {moved.mean:,.0f} on average, {moved.longest:,} at most){more}"
    )
