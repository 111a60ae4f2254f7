"""Proposes what a user may do about a run that failed: commands for its case, beside what its own error advises."""

from __future__ import annotations

import shlex

from drivetrain.run_page.record import KILLED, Record, trouble_step

MEMORY = ("out of memory", "OutOfMemory", "signal 9", "SIGKILL", "killed", "cannot allocate")
REWARD = "failed for all"  # in the message of a run that ended by a reward
Remedy = tuple[str, str]


def remedies(record: Record) -> list[Remedy]:
    """Returns sentences, each with a command or "". Empty for a run that did not fail."""
    if not record.is_bad:
        return []
    folder = shlex.quote(str(record.folder))
    run_file = shlex.quote(str(record.folder / "run.yaml"))
    found: list[Remedy] = []
    step = trouble_step(record)
    if step is not None:
        found.append(("Compute the step again, layer by layer:", f"drivetrain replay {folder} --step {step}"))
    if record.status == "lost" or any(word in record.message for word in MEMORY):
        found.append(("See what the run needs, and what would make it fit:", f"drivetrain plan {run_file}"))
    if record.message == KILLED:
        found.append(("Ask the system's log whether memory ran out, which makes it kill processes:", "dmesg"))
    if REWARD in record.message:
        again = (
            "Once the reward's function is right, go on with the answers that came; their rewards are asked for again:"
        )
        found.append((again, f"drivetrain train {run_file} --resume"))
    elif record.checkpoints:
        saved = f"Go on from its newest good checkpoint ({record.checkpoints[-1]}):"
        found.append((saved, f"drivetrain train {run_file} --resume"))
    if REWARD not in record.message:
        found.append(("Check the run file, the data and the model:", f"drivetrain check {run_file}"))
    found.append(("Pack all records for a report of a bug:", f"drivetrain doctor {folder} --bundle"))
    return found
