"""Texts that are not UTF-8: which encoding it looks like, and how to convert it."""

from __future__ import annotations

from pathlib import Path

from drivetrain.data.packed_files import PackedError, ending, open_bytes
from drivetrain.errors import UserError, problem

KNOWN_AS = {"GB18030": "GBK (GB18030)", "WINDOWS-1252": "ANSI (WINDOWS-1252)"}  # names that users know
IN_EXCEL = "or in Excel: Save As, CSV UTF-8"


def not_utf8(error: UnicodeDecodeError, path: str, field: str, first_line: int = 1) -> UserError:
    """Returns the error of another encoding. first_line: the one in which undecodable bytes begin."""
    line = error.object.count(b"\n", 0, error.start) + first_line
    guess = guess_encoding(error.object)
    name = Path(path).name
    is_table = ending(Path(path)) in (".csv", ".tsv")
    return problem(
        field,
        f"{path} is not UTF-8: line {line} cannot be read; it looks like {KNOWN_AS.get(guess, guess)}",
        f"convert it: iconv -f {guess} -t UTF-8 {name} > utf8-{name}" + (f"; {IN_EXCEL}" if is_table else ""),
    )


def guess_encoding(data: bytes) -> str:
    """Guesses the encoding of a text that is not UTF-8, by the name that iconv takes."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    for codec, name in (("gb2312", "GB18030"), ("big5", "BIG5"), ("shift_jis", "SHIFT_JIS")):
        text = data[:100_000].decode(codec, errors="replace")
        foreign = sum(character > "\x7f" for character in text)
        # a European text fits such codecs by accident, but is ASCII for the most part
        if text.count("\ufffd") <= 0.05 * foreign and foreign > 0.2 * len(text):
            return name
    return "WINDOWS-1252"


def refusal_of(file: Path, error: Exception, path: str, field: str) -> UserError:
    """Returns the error for a file whose reading failed. A wrong encoding is named first, since it causes the rest."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, PackedError):
        return problem(field, str(error), "copy or download it again")
    if ending(file) != ".parquet" and (undecoded := _first_bad_line(file)):
        line, cause = undecoded
        return not_utf8(cause, path, field, line)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return problem(field, f"{path} cannot be read: {reason}", "correct the file")


def _first_bad_line(file: Path) -> tuple[int, UnicodeDecodeError] | None:
    """Returns the line that is not UTF-8, and the error of the file's beginning, by which its encoding is guessed."""
    with open_bytes(file) as opened:
        for number, line in enumerate(opened, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                opened.seek(0)
                start = opened.read(100_000)
                return number, UnicodeDecodeError("utf-8", start or line, 0, 1, error.reason)
    return None
