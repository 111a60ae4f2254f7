"""Errors as a Python caller gets them: UserError or RunError, which name Python's arguments instead of run-file
keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.errors import Interrupted, Problem, RankError, RunError, UserError

# what the command line calls it: what it is called here
ARGUMENTS = {
    "--resume": "resume=True",
    "--overwrite": "overwrite=True",
    "--trust": "trust=True",
    "--checkpoint": "checkpoint",
    "--data": "data",
    "--text": "data",
    "--output": "output",
    "another output or name": "another name= or output=",
    "workload.path": "arguments",
}
_FLAG = re.compile("|".join(rf"(?<![\w.]){re.escape(flag)}(?![\w-])" for flag in ARGUMENTS))


@contextmanager
def as_a_caller_reads_them(has_objects: bool = False) -> Iterator[None]:
    """While the block runs, turns errors into those that the caller may expect.

    UserError: refused before any work, with all problems. RunError: failed while running; a rank's own traceback is in
    its message, an exception of this process is its cause. KeyboardInterrupt: ended before the run could save.

    has_objects: whether the run is made of the caller's objects, so that messages must not blame a file.
    """
    try:
        yield
    except UserError as error:
        raise UserError([_in_python(each, has_objects) for each in error.problems]) from error.__cause__
    except RunError as error:
        raise RunError(_flags(str(error))) if type(error) is RunError else error from error.__cause__
    except RankError as error:
        raise RunError(f"{error.traceback}{error}".strip()) from None
    except Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None


def _in_python(found: Problem, has_objects: bool) -> Problem:
    field = found.field
    if field in ARGUMENTS and (has_objects or field != "workload.path"):
        field = ARGUMENTS[field].partition("=")[0]
    fix = found.fix.replace("correct the file", "correct it") if has_objects else found.fix
    return Problem(field, _flags(found.why), _flags(fix))


def _flags(text: str) -> str:
    return _FLAG.sub(lambda match: ARGUMENTS[match[0]] if match[0] != "workload.path" else match[0], text)
