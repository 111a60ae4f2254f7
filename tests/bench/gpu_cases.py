"""Cases that do next to nothing, for the tests of `make gpu`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.setting import Setting


def quick(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Leaves a line in a file for each time that it runs."""
    del folder
    with Path(given["journal"]).open("a") as file:
        file.write(f"{given['name']}\n")
    return {"device": setting.device, **given.get("answer", {})}


def broken(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    quick(given, setting, folder)
    raise ValueError("of the case")


def endless(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """With a process of its own, whose number it leaves."""
    quick(given, setting, folder)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(given["child"]).write_text(str(child.pid))
    time.sleep(600)
    return {}
