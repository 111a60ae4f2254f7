"""Each axis of the mesh against the same PyTorch API used by hand, and a pipeline's bubble against its closed form.

    python bench/mesh.py

As bench/engines.py: examples/plain/mesh_*.py and the run files beside them, in turns.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from engines import arguments, compared, ratios, timed
from interleaved import Pair
from tables import machine_line, markdown_table, write

from drivetrain.engines.pipeline import bubble

AXES = {f"mesh_{axis}": 2 for axis in ("tp", "pp", "cp", "dp", "shard")}
CUTS = (2, 4, 8, 16)  # micro-batches of a window


def main() -> None:
    options = arguments("each axis of the mesh against the same API by hand", AXES, "mesh.md", 40)
    found: dict[str, list[Pair]] = {}
    for found in compared(options):
        write(options.output, page(found, [], options.steps))
    waits = [waiting(schedule, pieces) for schedule in ("gpipe", "1f1b", "zero_bubble") for pieces in CUTS]
    write(options.output, page(found, waits, options.steps))


def waiting(schedule: str, pieces: int) -> list[str]:
    """A row: two stages, a global batch of 32 in `pieces` micro-batches."""
    with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
        engine = f"engine={{name: mesh, pp: 2, schedule: {schedule}}}"
        settings = [f"output={folder}/run", "loop.steps=16", "evaluation.every_steps=16", "batch_size=32"]
        settings += [engine, f"micro_batch_size={32 // pieces}", "--quiet"]
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
