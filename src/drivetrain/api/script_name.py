"""Names a run that has no name, and no run file to take one from, after the script or the notebook that starts it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from drivetrain.config.run import NAME

NOTEBOOK = "JPY_SESSION_NAME"  # in which Jupyter's server gives a kernel the path of its notebook


def script_name() -> str | None:
    """Returns the name of the script (train for train.py, and for python -m package.train) or of the notebook, as a run
    file's name is that of its runs. None at a prompt, with python -c, and in a program that is no script (pytest)."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None) or os.environ.get(NOTEBOOK) or ""
    name = Path(file).stem
    is_script = Path(file).suffix in (".py", ".ipynb") and name != "__main__"
    return name if is_script and re.fullmatch(NAME, name) else None
