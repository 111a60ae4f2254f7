"""Arrays on disk where the cache cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.runtime import scratch

PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np
from drivetrain.data.array_store import Writer, stored

def build(folder):
    with Writer(folder) as writer:
        writer.append("ids", np.arange(5))
        writer.finish({})

found, warning = stored(Path(sys.argv[1]) / "below", "tokens-1", build)
assert found.array("ids").tolist() == [0, 1, 2, 3, 4]
assert "could not be cached" in warning
print(found.folder, flush=True)
sys.stdin.read()
if sys.argv[2] == "at once":
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["usual", "at once"])
def test_what_lies_in_the_temporary_folder_instead_goes_with_its_process(how: str, tmp_path: Path) -> None:
    """At once: as ranks end, without exit handlers. Then the next launch removes it, and not before."""
    (tmp_path / "file").write_text("no folder")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), how]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        folder = Path(running.stdout.readline().strip())
        assert folder.parent == tmp_path
        assert scratch.delete_dead(tmp_path) == []
        assert (folder / "ids").exists()
        running.communicate("")
    assert running.returncode == 0
    assert scratch.delete_dead(tmp_path) == ([folder] if how == "at once" else [])
    assert not folder.exists()
