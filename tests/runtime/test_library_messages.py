"""Messages that libraries print as they are imported, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import logging, sys
from drivetrain.cli import main
try:
    main([*sys.argv[1:], "recipes"])
except SystemExit as ended:
    assert ended.code == 0
logging.lastResort.setLevel("INFO")
logging.getLogger("torchao.kernel.one").warning("Failed to load _C.so")
logging.getLogger("DeepSpeed").setLevel("WARNING")  # as DeepSpeed does when it is imported
logging.getLogger("DeepSpeed").warning("Setting accelerator to CPU. If you have a GPU")
logging.getLogger("DeepSpeed").warning("the scale fell")
"""


def test_what_is_no_news_is_shown_with_v_alone() -> None:
    def told(*given: str) -> str:
        return subprocess.run([sys.executable, "-c", CODE, *given], capture_output=True, text=True, check=True).stderr

    quiet, loud = told(), told("-v")
    news = [line for line in ("Failed to load", "Setting accelerator", "the scale fell") if line in quiet]
    assert news == ["the scale fell"]
    assert all(line in loud for line in ("Failed to load", "Setting accelerator", "the scale fell"))
