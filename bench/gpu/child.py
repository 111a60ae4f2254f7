"""One case in a process of its own: `python -m bench.gpu.child MODULE:FUNCTION TASK.json ANSWER.json`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu.setting import RESULTS, Setting


def main(work: str, task: Path, answer: Path) -> None:
    read = json.loads(task.read_text())
    where = read["setting"]
    setting = Setting(where["device"], where["device_name"], RESULTS, Path(where["scratch"]))
    module, _, function = work.partition(":")
    home = import_module(module if "." in module else f"bench.gpu.{module}")
    found: dict[str, Any] = getattr(home, function)(read["given"], setting, Path(read["folder"]))
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
