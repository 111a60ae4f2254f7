"""`make demo`: the digits recipe at four precisions, each in a process of its own, and a table of what they cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from drivetrain.folder import RunFolder
from drivetrain.report import RunReport
from drivetrain.show import comparison_table

RECIPE = Path("recipes/digits.yaml")
PRECISIONS = ("fp32", "bf16", "bf16-mixed", "fp16-mixed")


def main() -> int:
    """Exit code of the first run that fails, else 0."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)  # a file has no width to keep to
    reports = []
    for precision in PRECISIONS:
        output = Path("runs/demo") / precision
        console.print(f"[bold]drivetrain train {RECIPE} precision={precision} output={output}[/]", soft_wrap=True)
        command = [sys.executable, "-m", "drivetrain", "train", str(RECIPE)]
        done = subprocess.run(
            [*command, f"precision={precision}", f"output={output}", "--overwrite"],
            stdout=subprocess.DEVNULL,  # its table; ours follows
            check=False,
        )
        if done.returncode:
            return done.returncode
        reports.append(RunReport.read(RunFolder(output).report))
    console.print(comparison_table(reports), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
