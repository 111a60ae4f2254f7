"""Runs pytest in forked copies of a process that has imported others' packages already.

On a busy machine those imports take ten times as long as the test that kills a mutation. The project's own modules are
never imported before the fork, so that each run reads them as they are on disk.

    python server.py MODULE[:NAME] ...     imported first; what cannot be imported is left to the tests

A line of JSON on stdin asks for a run: [pytest's arguments, additions to the environment, file for the output]. The
answers are two lines: the process id, which is its group's too, and the exit code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from typing import TextIO


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    plugins = [entry.value for entry in importlib.metadata.entry_points(group="pytest11")]
    preload(["pytest", *plugins, *sys.argv[1:]])
    gc.freeze()
    for line in sys.stdin:
        serve(answers, *json.loads(line))


def preload(modules: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            with contextlib.suppress(Exception):
                path, _, name = module.partition(":")
                imported = importlib.import_module(path)
                getattr(imported, name, None)  # Transformers imports a class's module when the class is asked for


def serve(answers: TextIO, arguments: list[str], added: dict[str, str], output: str) -> None:
    child = os.fork()
    if not child:
        _run(arguments, added, output)
    print(child, file=answers, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(arguments: list[str], added: dict[str, str], output: str) -> None:
    """Never returns."""
    code = 70
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        os.environ.update(added)
        tempfile.tempdir = None
        import pytest

        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
