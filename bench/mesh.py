"""Each axis of the mesh against the same PyTorch API used by hand, and a pipeline's bubble against its closed form.

    python bench/mesh.py

As bench/engines.py: examples/plain/mesh_*.py and the run files beside them, in turns. Both see whole batches only: the
README is laid end to end until no epoch ends within the run, with a smaller batch that the scripts by hand do not have.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from engines import ROOT, arguments, compared, ratios, timed
from interleaved import Pair
from tables import machine_line, markdown_table, write

from drivetrain.engines.mesh.pipeline import bubble

AXES = {f"mesh_{axis}": 2 for axis in ("tp", "pp", "cp", "dp", "shard")}
CUTS = (2, 4, 8, 16)  # micro-batches of a window
BATCH, LENGTH = 16, 128  # of the run files
WAITING_STEPS = 16


def main() -> None:
    options = arguments("each axis of the mesh against the same API by hand", AXES, "mesh.md", 40)
    found: dict[str, list[Pair]] = {}
    with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
        data = f"data.train={text(Path(folder), max(options.steps, 2 * WAITING_STEPS))}"
        for found in compared(options, data):
            write(options.output, page(found, [], options.steps))
        waits = [waiting(schedule, pieces, data) for schedule in ("gpipe", "1f1b", "zero_bubble") for pieces in CUTS]
    write(options.output, page(found, waits, options.steps))


def text(folder: Path, steps: int) -> Path:
    """A file of so many batches, and the tenth that is held out."""
    readme = (ROOT / "README.md").read_text()
    wanted = steps * BATCH * LENGTH * 10 // 9 + LENGTH
    file = folder / "text.txt"
    file.write_text(readme * (wanted // len(readme) + 1))
    return file


def waiting(schedule: str, pieces: int, data: str) -> list[str]:
    """A row: two stages, a global batch of 32 in `pieces` micro-batches."""
    with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
        engine = f"engine={{name: mesh, pp: 2, schedule: {schedule}}}"
        settings = [f"output={folder}/run", f"loop.steps={WAITING_STEPS}", f"evaluation.every_steps={WAITING_STEPS}"]
        settings += ["batch_size=32", engine, f"micro_batch_size={32 // pieces}", data, "--quiet"]
        timed(["-m", "drivetrain", "train", "examples/plain/mesh_pp.yaml", *settings])
        ranks = json.loads((Path(folder) / "run" / "report.json").read_text())["ranks"]
    shares = [rank["waiting_share"] for rank in ranks]
    expected = "" if schedule == "zero_bubble" else f"{bubble(2, pieces):.1%}"
    return [schedule, str(pieces), *(f"{share:.1%}" for share in shares), expected]


def page(found: dict[str, list[Pair]], waits: list[list[str]], steps: int) -> str:
    head = ["schedule", "micro-batches", "first stage waits", "last stage waits", "(p-1)/(m+p-1)"]
    return "\n".join(
        [
            "# The mesh",
            "",
            "Samples a second of `drivetrain train examples/plain/mesh_<axis>.yaml` over those of the hand-written "
            f"`examples/plain/mesh_<axis>.py` (1.00: no cost); {steps} steps of a small Llama (4 layers, 256 wide, 128 "
            "tokens, batch 16). Fresh processes in turns, order swapped from pair to pair. `python bench/mesh.py` "
            "repeats it.",
            "",
            machine_line(),
            "",
            ratios(found),
            "",
            "Share of each window in which a stage of two does not compute, of 32 samples in m micro-batches: the "
            "schedule's bubble, unequal stages (the last one has the head and the loss), and what exchanges take.",
            "",
            markdown_table(head, waits),
            "",
        ]
    )


if __name__ == "__main__":
    main()
