"""`drivetrain.load`: a run's folder → an nn.Module with its weights, without reading its data."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from drivetrain.api.errors import as_a_caller_reads_them
from drivetrain.api.settings import read_run
from drivetrain.checkpoint.directory import load as load_checkpoint
from drivetrain.checkpoint.directory import newest_good, read_manifest, steps
from drivetrain.checkpoint.run_state import verify
from drivetrain.config.run import RunConfig
from drivetrain.engines.auxiliary import without_attached
from drivetrain.engines.state import kept
from drivetrain.errors import UserError, problem
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.models.finished import finished_model, tokenizer_beside
from drivetrain.models.merged_adapters import merged
from drivetrain.objects.held import missing
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training.report import RunReport
from drivetrain.trust.named_code import refuse_named_code
from drivetrain.trust.remote_code import PERMISSIONS
from drivetrain.workloads.user_file import UserFile

LOG = logging.getLogger(__name__)
Folder = str | os.PathLike[str] | RunReport


def load(
    folder: Folder,
    checkpoint: str = "best",
    *,
    model: nn.Module | None = None,
    adapter: Literal["merge", "keep"] = "merge",
    trust: bool = False,
) -> nn.Module:
    """Returns the model of a run with the weights of a checkpoint: on the CPU, in fp32, in evaluation mode.

    folder: a run's folder, or the report that drivetrain.train returned. checkpoint: "best", "last", or the folder of
    one. model: required for a run that was trained on objects; it is filled and returned. A run of a Python file makes
    its model by that file; a Transformers model needs neither data nor network, except that adapters need their base.

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
        run = run_of(folder)
        path = checkpoint_of(run, checkpoint)
        if model is None:
            refuse_named_code(_without_training(run), run.folder, trust)
            if not trust:
                _refuse_code_beside(run, path)
        weights = without_attached(load_checkpoint(path, verify)["model"])
        return _filled(run, path, model, weights, adapter).eval()


def run_of(folder: Folder) -> RunConfig:
    """Returns the run in a folder, which may have been moved. Raises UserError if there is none."""
    place = folder.folder if isinstance(folder, RunReport) else Path(folder).expanduser()
    file = RunFolder(place).run_file
    if not file.is_file():
        why = f"{place} holds no run: it has no {file.name}" if place.is_dir() else f"there is no folder {place}"
        raise problem("folder", why, "give the folder of a run (runs/NAME), or the report that train returned")
    run, problems, _ = read_run(file, {"output": place})
    if run is None or problems:
        raise UserError(problems)
    return run


def checkpoint_of(run: RunConfig, given: str) -> Path:
    """Returns the folder of the best or the last checkpoint, or the named one, without building the run."""
    if given not in ("best", "last"):
        if not Path(given).is_dir():
            raise problem("checkpoint", f"{given} is no checkpoint folder", "give best, last or a folder step-...")
        return Path(given)
    root = RunFolder(run.folder).checkpoints
    newest, _ = newest_good(root, verify)
    if newest is None:
        raise problem("checkpoint", f"{root} holds no good checkpoint", "train first, or give the folder of one")
    wanted = (read_manifest(newest).facts.get("best") or {}).get("step")
    if given == "last" or wanted is None:
        return newest
    found = next((path for path in steps(root) if read_manifest(path).step == wanted and not verify(path)), None)
    if found is None:
        LOG.warning("the best evaluation (step %s) has no good checkpoint: taking %s", wanted, newest)
    return found or newest


def _refuse_code_beside(run: RunConfig, path: Path) -> None:
    """Raises UserError for Python beside a checkpoint's weights that a permission of the run would let run. The
    permission covers the files at workload.model.path, and this copy may differ from them."""
    own = [key for key in PERMISSIONS.values() if _permits(run, key)]
    code = sorted(path.glob("**/*.py"))
    if own and code:
        why = f"{path} came with Python code ({code[0].name}), which {' and '.join(own)} would let run"
        raise problem(f"workload.model.{own[0]}", why, "read that code, and where you trust it give --trust")


def _permits(run: RunConfig, key: str) -> bool:
    return bool(getattr(run.workload.described_model, key, False))


def _without_training(run: RunConfig) -> RunConfig:
    """Returns the run without what loading its model does not need: no optimizer, schedule or tracker is made."""
    plain = RunConfig.model_fields
    names = ("optimizer", "schedule", "tracking")
    return run.model_copy(update={name: plain[name].default for name in names})


def _filled(run: RunConfig, path: Path, model: nn.Module | None, weights: dict[str, Tensor], adapter: str) -> nn.Module:
    made = model if model is not None else _made(run, path)
    if run.quantisation_aware is not None:
        FakeQuantiser(run.quantisation_aware).prepare(made)
    if run.adapter is not None:
        made = AdapterSet(run.adapter, run.workload.base).fit(made)
    own = kept(made, made.state_dict())
    other = sorted(own.keys() ^ weights.keys()) or [n for n in own if own[n].shape != weights[n].shape]
    if other:
        why = f"the weights in {path} are of another model: {', '.join(other[:3])} differ"
        raise problem("model", why, "give the model that was trained" if model is not None else "load with model=...")
    made.load_state_dict(weights, strict=False)
    if run.adapter is not None and adapter == "merge":
        made = merged(made)
    if run.workload.has_tokenizer:
        made.tokenizer = tokenizer_beside(path, run.workload)
    return made


def _made(run: RunConfig, path: Path) -> nn.Module:
    workload = run.workload
    code = workload.code_file
    if code is not None:
        file = UserFile(code.path, code.options)
        name = "build_model" if file.has("build_model") else "model"
        found: Any = file.made(name)
        made: nn.Module = copy.deepcopy(found) if found is file.get(name) else found
        return made.float().cpu()
    if workload.needs_objects:
        raise missing()
    return finished_model(workload, path, of_a_base=run.adapter is not None)
