"""The hub itself needs a network: a stand-in for the package datasets answers here as version 5 of it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.data import tables
from drivetrain.data.rows import open_rows
from drivetrain.errors import RunError, UserError

ROWS = [{"n": n, "text": f"text {n}"} for n in range(10)]


class Downloaded:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, part: slice) -> dict[str, list[Any]]:
        return {name: [row[name] for row in self._rows[part]] for name in ("n", "text")}


class Streamed:
    def __init__(self, counts: dict[str, int] | None, skips: list[int], start: int = 0) -> None:
        splits = counts and {name: SimpleNamespace(num_examples=count) for name, count in counts.items()}
        self.info = SimpleNamespace(splits=splits)
        self._skips, self._start = skips, start

    def skip(self, count: int) -> Streamed:
        self._skips.append(count)
        return Streamed(None, self._skips, count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS[self._start :])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """answer: what `load_dataset` gives or raises; asked: how it was called."""
    state = SimpleNamespace(answer=None, asked=None)

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        state.asked = (arguments, options)
        if isinstance(state.answer, Exception):
            raise state.answer
        return state.answer

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(tables, "_check_reachable", lambda *_: None)
    return state


def test_a_downloaded_data_set_is_read_by_ranges(hub: SimpleNamespace) -> None:
    hub.answer = Downloaded(ROWS)
    opened = open_rows("owner/name", "F", subset="en", split="test", folder="data")
    assert hub.asked == (("owner/name", "en"), {"split": "test", "data_dir": "data", "streaming": False})
    assert (len(opened), opened.where(2)) == (10, "owner/name row 3")
    assert [opened.read(0, 3), opened.read(8, 12), opened.read(4, 4)] == [ROWS[:3], ROWS[8:], []]


def test_a_streamed_data_set_goes_on_where_it_was(hub: SimpleNamespace) -> None:
    skips: list[int] = []
    hub.answer = Streamed({"train": 10}, skips)
    opened = open_rows("name", "F", stream=True)
    assert hub.asked[1]["streaming"]
    assert len(opened) == 10
    for start, stop in [(0, 3), (3, 4), (4, 8), (8, 12)]:
        assert opened.read(start, stop) == ROWS[start:stop]
    assert skips == [0]
    assert opened.read(2, 4) == ROWS[2:4]
    assert skips == [0, 2]
    assert [opened.read(n, n + 1) for n in (5, 6, 9)] == [ROWS[5:6], ROWS[6:7], ROWS[9:]]
    assert skips == [0, 2], "rows that nobody wants are passed over, not skipped from the start"


def test_inner_nulls_of_a_hub_data_set_are_absent(hub: SimpleNamespace) -> None:
    """datasets gives every row the fields of all."""
    rows = [{"n": n, "text": {"a": 1, "b": None, "c": [{"d": None}]}} for n in range(10)]
    clean = [{"n": n, "text": {"a": 1, "c": [{}]}} for n in range(10)]
    hub.answer = Downloaded(rows)
    assert open_rows("owner/name", "F").read(0, 10) == clean


def test_a_streamed_data_set_must_say_how_long_it_is(hub: SimpleNamespace) -> None:
    for counts in (None, {"test": 3}, {"train": 0}):
        hub.answer = Streamed(counts, [])
        with pytest.raises(UserError, match=r"does not state how many rows its split train has(.|\n)*download it"):
            open_rows("name", "F", stream=True)


def test_a_stream_that_ends_too_early_stops_the_run(hub: SimpleNamespace) -> None:
    hub.answer = Streamed({"train": 12}, [])
    with pytest.raises(RunError, match="says that it has 12 rows, and ended after 10"):
        open_rows("name", "F", stream=True).read(5, 12)


def test_a_stream_whose_network_fails_stops_the_run(hub: SimpleNamespace) -> None:
    hub.answer = Streamed({"train": 10}, [])
    opened = open_rows("name", "F", stream=True)
    hub.answer.skip = lambda _: 1 / 0
    with pytest.raises(RunError, match="name row 6 did not come: division by zero"):
        opened.read(5, 8)


def test_of_a_stream_that_breaks_the_row_that_did_not_come_is_named(hub: SimpleNamespace) -> None:
    hub.answer = Streamed({"train": 10}, [])
    opened = open_rows("name", "F", stream=True)
    hub.answer.skip = lambda start: (row if row["n"] != 7 else 1 / 0 for row in ROWS[start:])
    assert opened.read(0, 2) == ROWS[:2]
    with pytest.raises(RunError, match="name row 8 did not come: division by zero"):
        opened.read(4, 9)
    del hub.answer.skip
    assert opened.read(4, 9) == ROWS[4:9]


def test_what_the_hub_refuses_names_the_way_without_it(hub: SimpleNamespace) -> None:
    hub.answer = ConnectionError("no route\nto host")
    with pytest.raises(UserError, match=r"cannot be had from the hub: no route\n.*download the data elsewhere"):
        open_rows("owner/name", "F")
    hub.answer = Downloaded([])
    with pytest.raises(UserError, match="no rows in its split train"):
        open_rows("owner/name", "F")


def test_without_the_package_its_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"need the package datasets\n.*drivetrain\[hub\]"):
        open_rows("owner/name", "F")
