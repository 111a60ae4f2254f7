"""Bad rows, counted by reason and against the share that may be left out."""

from __future__ import annotations

import pytest

from drivetrain.data.bad_rows import BadRow, allowance, by_reason, exceeds


def test_reasons_that_differ_in_particulars_alone_are_one() -> None:
    bad = [BadRow(f"a line {number}", f"message {number} has the unknown role 'x{number}'") for number in range(3)]
    bad.insert(1, BadRow("a line 9", "output is empty"))
    assert by_reason(bad) == [
        "3 because message 0 has the unknown role 'x0' (first a line 0)",
        "1 because output is empty (first a line 9)",
    ]


def test_of_many_reasons_the_rarest_are_counted_together() -> None:
    bad = [BadRow("a", letter) for letter in "aabbccddeefgh"]
    assert by_reason(bad)[-1] == "3 for other reasons"
    assert len(by_reason(bad)) == 6


@pytest.mark.parametrize("rows", [1, 7, 100, 333, 10_000])
def test_the_setting_named_to_allow_so_many_bad_rows_does(rows: int) -> None:
    for bad in range(1, rows + 1, max(1, rows // 100)):
        given = allowance(bad, rows).removeprefix("give workload.data.bad_rows=").split(",")[0]
        assert not exceeds(bad, rows, 0.05 if given == "drop" else float(given))
        assert given == "drop" or exceeds(bad, rows, 0.05)


def test_a_single_bad_row_is_no_share_unless_none_may_be_left_out() -> None:
    assert not exceeds(1, 2, 0.05)
    assert exceeds(1, 2, 0.0)
    assert exceeds(2, 20, 0.05)
