"""A recipe that is fitted to a user's data, and its batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from drivetrain.errors import counted
from drivetrain.runtime.native_bfloat16 import device_with_bfloat16

MOST_EVALUATIONS = 20  # of a run that was made longer
LEAST_STEPS = 200  # of a run: a model that starts from scratch learns nothing in a few
STEPS_AN_EPOCH = 4  # at least: a batch of more than a quarter of the data would teach little

COMMENT_COLUMN = 30  # as in most recipes


@dataclass
class Fitted:
    """A fitted recipe. decisions: one sentence each, for comments at the top of the file. is_chosen: whether the user
    named the recipe. beside: further files by their endings."""

    text: str
    decisions: list[str]
    is_chosen: bool = False
    beside: dict[str, str] = field(default_factory=dict)


def fit_precision(run: Any, made: Fitted, quicker_on: Collection[str]) -> None:
    """Sets bf16-mixed where this machine's device computes in bfloat16. quicker_on: the devices, of "cpu" and "cuda",
    on which such a model is trained faster then."""
    device = device_with_bfloat16(str(run.get("device", "auto")))
    if device not in quicker_on:
        return
    if "precision" in run:
        run["precision"] = "bf16-mixed"
    else:
        run.insert([*run].index("loop"), "precision", "bf16-mixed")
    comment = "products in bfloat16, weights in fp32; fp32 rounds least"
    run.yaml_add_eol_comment(comment, "precision", column=COMMENT_COLUMN)
    made.decisions.append(
        f"precision: bf16-mixed, since this machine's {'GPU' if device == 'cuda' else 'processor'} computes in "
        "bfloat16 (weights stay in fp32); precision: fp32 rounds least."
    )


def fit_batch(run: Any, samples: float, made: Fitted) -> None:
    """Sets a batch size that gives at least some batches an epoch, and for a model from scratch epochs that give at
    least LEAST_STEPS steps: one that was trained before would learn so few samples by heart in as many."""
    most = max(1, int(samples) // STEPS_AN_EPOCH)
    batch = int(run.get("batch_size", 32))
    if batch > most:
        run["batch_size"] = most
        made.decisions.append(f"There are few samples: a batch has {most} in place of the recipe's {batch}.")
    loop, an_epoch = run["loop"], max(1, -(-int(samples) // min(batch, most)))
    from_scratch = "path" not in run["workload"]["model"]
    if from_scratch and "epochs" in loop and loop["epochs"] * an_epoch < LEAST_STEPS:
        given, loop["epochs"] = loop["epochs"], -(-LEAST_STEPS // an_epoch)
        if loop["epochs"] > MOST_EVALUATIONS:
            run["evaluation"] = {"every_epochs": -(-loop["epochs"] // MOST_EVALUATIONS)}
        made.decisions.append(
            f"An epoch has {counted(an_epoch, 'step')}: {counted(loop['epochs'], 'epoch')} in place of the "
            f"recipe's {given} make {counted(loop['epochs'] * an_epoch, 'step')}, which a model from scratch "
            "needs to learn anything."
        )


def listed(classes: tuple[str, ...]) -> str:
    shown = ", ".join(classes[:6])
    return f"{len(classes)} class{'' if len(classes) == 1 else 'es'} ({shown}{', ...' if len(classes) > 6 else ''})"
