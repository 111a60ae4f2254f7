"""`drivetrain.load`: a run's folder → an nn.Module with its weights, without reading its data."""

from __future__ import annotations

import os
from typing import Literal

from torch import nn

from drivetrain.api.errors import as_a_caller_reads_them
from drivetrain.errors import problem
from drivetrain.inference.remote_places import checkpoint_here, here
from drivetrain.inference.run_sources import Folder, checkpoint_of, run_of
from drivetrain.inference.whole_model import loaded_model
from drivetrain.training.report import RunReport


def load(
    folder: Folder,
    checkpoint: str = "best",
    *,
    model: nn.Module | None = None,
    adapter: Literal["merge", "keep"] = "merge",
    trust: bool = False,
) -> nn.Module:
    """Returns the model of a run with the weights of a checkpoint: on the CPU, in fp32, in evaluation mode.

    folder: a run's folder, the address in a store that it was mirrored to, or the report that drivetrain.train
    returned. checkpoint: "best", "last", or the folder of one. model: required for a run that was trained on objects;
    it is filled and returned. A run of a Python file makes its model by that file; a Transformers model needs neither
    data nor network, except that adapters need their base.

    adapter: "merge" adds LoRA's and IA3's products to the weights, so that the model has the class and the names of its
    base (a base that was kept in 4 or 8 bits is taken unquantised); "keep" leaves them beside it, as PEFT has them.
    Prompts and prefixes cannot be merged and always stay.

    The model of a text workload has its tokenizer as `model.tokenizer`.

    Raises UserError for a folder without such a checkpoint, weights of another model, and Python that the folder names
    from outside the current one, unless trust is set (docs/reference/security.md).
    """
    with as_a_caller_reads_them():
        if adapter not in ("merge", "keep"):
            raise problem("adapter", f"{adapter!r} was given", 'give "merge" or "keep"')
        checkpoint = checkpoint_here(checkpoint)
        run = run_of(folder if isinstance(folder, RunReport) else here(os.fspath(folder), [checkpoint], "folder"))
        path = checkpoint_of(run, checkpoint)
        return loaded_model(run, path, model, adapter, trust)
