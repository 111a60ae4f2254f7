"""The order of a stream: that which is written out plainly, wherever reading begins and however much is known."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.data.order import DrawnOrder
from drivetrain.data.streams.line_shards import LineShard
from drivetrain.data.streams.mixture import Mix, StreamedMixture
from tests.data.streams.shard_files import ENDINGS, numbers_of, opened, plain_order, write_shard, write_shards
from tests.properties import examples

COUNTS = [5, 1, 13, 7, 9, 2, 30, 4, 11, 6]


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 3))
def test_a_pass_takes_each_row_once_in_the_order_that_is_written_out(
    tmp_path: Path, counts: list[int], buffer: int, seed: int
) -> None:
    folder = tmp_path / "shards"
    shutil.rmtree(folder, ignore_errors=True)
    shards = write_shards(folder, counts, [".jsonl", ".jsonl.gz", ".parquet"])
    stream, rows = numbers_of(opened(folder), buffer, seed), sum(counts)
    taken = [stream.load(draw) for draw in range(3 * rows)]
    for turn in range(3):
        assert taken[turn * rows : (turn + 1) * rows] == plain_order(shards, buffer, seed, turn)
    assert sorted(taken[:rows]) == list(range(rows))


@pytest.mark.parametrize("ending", ENDINGS)
def test_shards_of_each_form_are_read_alike(tmp_path: Path, ending: str) -> None:
    shards = write_shards(tmp_path / "shards", COUNTS, [ending])
    stream = numbers_of(opened(tmp_path / "shards"), 16)
    assert [stream.load(draw) for draw in range(88)] == plain_order(shards, 16, 0, 0)
    assert stream.name(0).startswith("000")


def test_a_draw_is_the_same_sample_wherever_reading_begins(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", COUNTS)
    wanted = [number for turn in range(3) for number in plain_order(shards, 10, 0, turn)]
    for draw in (263, 0, 87, 88, 150, 31, 176):
        cold = numbers_of(opened(tmp_path / "shards", tmp_path / f"cache-{draw}"), 10)
        assert cold.load(draw) == wanted[draw]
    warm = numbers_of(opened(tmp_path / "shards"), 10)
    assert [warm.load(draw) for draw in reversed(range(264))] == wanted[::-1]


def test_the_first_samples_come_without_a_count_and_counts_are_kept_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "shards", [40] * 8, [".jsonl.gz", ".jsonl"])
    counted: list[str] = []
    count = LineShard.count

    def noted(shard: LineShard) -> int:
        if shard.known is None:
            counted.append(shard.name)
        return count(shard)

    monkeypatch.setattr(LineShard, "count", noted)
    first = numbers_of(opened(tmp_path / "shards"), 16)
    for draw in range(200):
        first.load(draw)
    assert not counted, "a row count was asked for before the pass was over"
    again = numbers_of(opened(tmp_path / "shards"), 16)
    assert again.load(150) == first.load(150)
    assert not counted, "what was learned by reading is kept"
    assert len(again) == 320
    assert 0 < len(counted) <= 4, "those that had been read are not counted again"
    counted.clear()
    assert len(numbers_of(opened(tmp_path / "shards"), 16)) == 320
    assert not counted


def test_rows_before_the_place_are_passed_over_without_being_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "shards", [100] * 4, [".jsonl.gz"])
    parsed: list[int] = []
    plain = LineShard.parsed
    monkeypatch.setattr(
        LineShard, "parsed", lambda shard, line, number: parsed.append(number) or plain(shard, line, number)
    )
    stream = numbers_of(opened(tmp_path / "shards"), 50)
    for draw in range(330, 340):
        stream.load(draw)
    assert len(parsed) == 10


def test_no_more_than_two_blocks_are_held_and_a_shard_is_opened_once_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "shards", [1000] * 3, [".jsonl.gz"])
    openings: list[str] = []
    plain = LineShard._lines

    def noted(shard: LineShard) -> Any:
        openings.append(shard.name)
        return plain(shard)

    monkeypatch.setattr(LineShard, "_lines", noted)
    rows = opened(tmp_path / "shards")
    openings.clear()
    stream = numbers_of(rows, 64)
    for draw in range(3000):
        stream.load(draw)
        assert sum(len(block) for block in stream.rows._blocks.values()) <= 128
    assert sorted(openings) == ["0000.jsonl.gz", "0001.jsonl.gz", "0002.jsonl.gz"]


def test_a_row_moves_less_than_the_buffer_and_the_measured_travel_says_how_far(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [400], [".jsonl"])
    stream = numbers_of(opened(tmp_path / "shards"), 100)
    taken = [stream.load(draw) for draw in range(400)]
    moved = [abs(number - place) for place, number in enumerate(taken)]
    assert max(moved) < 100
    travel = stream.rows.travel()
    assert travel.longest == max(moved[:100])
    assert travel.mean == pytest.approx(sum(moved[:100]) / 100)
    assert 25 < travel.mean < 42


def test_first_rows_are_held_out_in_the_order_of_the_files(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", COUNTS)
    rows = opened(tmp_path / "shards")
    for start, stop in ((0, 6), (6, None), (7, 40), (5, 19), (19, None), (87, None)):
        part = numbers_of(opened(tmp_path / "shards", tmp_path / f"c{start}"), 8, start=start, stop=stop)
        assert sorted(part.load(draw) for draw in range(len(part))) == list(range(88))[start:stop]
    ordered = rows.in_order(3, 60)
    assert [piece.row(index)["number"] for draw in range(57) for piece, index in [ordered.at(draw)]] == list(
        range(3, 60)
    )


def test_steps_flow_over_the_end_of_an_epoch_and_epochs_end_with_a_smaller_batch(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", COUNTS)
    mixture = StreamedMixture([numbers_of(opened(tmp_path / "shards"), 16)], Mix())
    wanted = [number for turn in range(2) for number in plain_order(shards, 16, 0, turn)]

    def batches(order: DrawnOrder, steps: int) -> list[list[int]]:
        return [[mixture.load(int(index), 0) for index in order.batch(step)[1]] for step in range(steps)]

    flowing = mixture.order(10, 0, by_epochs=False)
    assert flowing.num_samples is None
    assert [*chain(*batches(flowing, 17))] == wanted[:170]
    by_epochs = mixture.order(10, 0, by_epochs=True)
    assert by_epochs.steps_per_epoch == 9
    found = batches(by_epochs, 18)
    assert [*chain(*found)] == wanted
    assert [len(batch) for batch in found] == [*[10] * 8, 8] * 2


def test_a_shard_without_rows_is_passed_over(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [3, 4], [".jsonl"])
    (tmp_path / "shards" / "0000b.jsonl").write_text("\n\n  \n")
    write_shard(tmp_path / "shards" / "0000c.parquet", [])
    stream = numbers_of(opened(tmp_path / "shards"), 4)
    assert sorted(stream.load(draw) for draw in range(7)) == list(range(7))
    assert len(stream) == 7
