"""The bench of streams from a store: a training passes it, and a page has what was found."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from bench import store_stream, stream_shards
from bench.store_stream import Disturbed, disturbed, page
from tests.store_server import StoreServer


@pytest.mark.long
def test_a_stream_through_faults_and_kills_takes_each_row_once_an_epoch_to_the_bits_of_the_disk(
    bucket: str, store_server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bucket, "whose fixture has the environment restored"
    monkeypatch.setattr(stream_shards, "NUM_SHARDS", 60)
    monkeypatch.setattr(store_stream, "NUM_ROWS", 480)
    monkeypatch.setattr(store_stream, "STEPS", 30)
    found = disturbed(store_server, tmp_path, 2, random.Random(0))
    assert len(found.kills) == 2
    assert {"slow", "refuse"} <= {*found.requests}


def test_the_page_has_the_median_of_the_ratios_and_their_range() -> None:
    found = Disturbed([12, 40], Counter({"answered at once": 1900, "slow": 100}), 90.0)
    ours, theirs = [[2.0, 1.0], [4.0, 1.0], [4.0, 2.0]], [[4.0, 1.0], [4.0, 2.0], [2.0, 2.0]]
    text = page(found, {("ours", 0): ours, ("litdata", 0): theirs}, 5)
    assert "killed at steps 12, 40 (seed 5). Of 2,000 requests 1,900 were answered at once, 100 0.3 s late." in text
    assert "| from the store, 0 workers | 16,000 | 16,000 | 1.00 (0.50 to 2.00) |" in text
    assert "| again, from the cache, 0 workers | 64,000 | 32,000 | 1.00 (1.00 to 2.00) |" in text
