"""Yields records of CSV and TSV texts one by one, in a strict dialect in which nothing is lost without an error."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import TextIO

from drivetrain.errors import clipped, counted

SHOWN = 5  # lines that are wrong
OTHERS = (";", "\t", "|")  # separators that other programs write
MOST_OF_A_LINE = 40  # characters of one that are shown

Record = tuple[int, list[str]]  # number of its first line in the file, and its fields


def checked_records(found: Iterator[Record], width: int, separator: str, shorter: bool = False) -> Iterator[Record]:
    """Yields records of the width. At the end, raises ValueError with the lines of those of another width.

    separator: for the message, which shows the lines. shorter: yield records of fewer fields too, as bad rows; one that
    goes over several lines stays an error, since a stray quote may have joined them.
    """
    wrong: list[str] = []
    count, widest, joined = 0, 0, False
    for line, fields in found:
        if len(fields) > width and not any(fields[width:]):  # separators at the end of the line
            del fields[width:]
        cut = shorter and len(fields) < width and not _goes_over_lines(fields)
        if len(fields) != width and not cut:
            count, widest = count + 1, max(widest, len(fields))
            joined |= len(fields) < width and _goes_over_lines(fields)
            if len(wrong) < SHOWN:
                shown = clipped(separator.join(fields), MOST_OF_A_LINE)
                wrong.append(f"line {line} has {counted(len(fields), 'column')} ({shown!r})")
        elif not count:  # all are counted to the end, for the message; none is used
            yield line, fields
    if count:
        left = count - SHOWN
        more = f", and {counted(left, 'more line')} {'is' if left == 1 else 'are'} wrong" if left > 0 else ""
        hint = ": quote a text that holds the separator" if widest > width else ""
        stray = " (a quote that is not doubled or not closed?)" if joined else ""
        raise ValueError(f"{', '.join(wrong)} where the first has {width}{more}{hint}{stray}")


def separated_otherwise(names: Sequence[object]) -> str | None:
    """Returns what to do about a table whose only column's name has another separator in it; None for others."""
    mark = next((each for each in OTHERS if each in str(names[0])), None) if len(names) == 1 else None
    if mark is None:
        return None
    shown = "tabs" if mark == "\t" else repr(mark)
    return f"its columns look separated by {shown}: write it with commas, or with tabs and a name that ends in .tsv"


def _goes_over_lines(fields: list[str]) -> bool:
    return any("\n" in field or "\r" in field for field in fields)


def records(text: TextIO, separator: str, longest_field: int) -> Iterator[Record]:
    """Yields records. text: opened with newline="". longest_field: in characters, at most. Raises ValueError with the
    line of a wrong quote."""
    before = csv.field_size_limit(max(longest_field, 131_072))  # the module's own bound is 128 KiB a field
    reader = csv.reader(text, delimiter=separator, strict=True)
    try:
        line = 1
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error} (a quote that is not doubled or not closed?)") from None
    finally:
        csv.field_size_limit(before)
        text.close()


def lines_are_records(text: TextIO) -> bool:
    """Returns whether each line of a TSV is one record, as in files whose quotes have no meaning: then none is wider
    than the first, and a narrower one is a row with too few columns. A narrower line with an odd number of quotes may
    be a part of a quoted record instead. text: opened with newline=None."""
    width = None
    with text:
        for line in text:
            if line.strip("\r\n"):
                count = line.rstrip("\r\n").count("\t")
                width = count if width is None else width
                if count > width or (count < width and line.count('"') % 2):
                    return False
    return width is not None


def unquoted_records(text: TextIO) -> Iterator[Record]:
    """Yields the records of a TSV for which `lines_are_records` holds. text: opened with newline=None."""
    with text:
        for number, line in enumerate(text, start=1):
            if line.strip("\r\n"):
                yield number, [_without_quotes(field) for field in line.rstrip("\r\n").split("\t")]


def _without_quotes(field: str) -> str:
    """Removes the quotes that a writer of quoted fields added; a field that merely holds quotes is unchanged."""
    inner = field[1:-1]
    quoted = len(field) > 1 and field[0] == field[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if quoted else field
