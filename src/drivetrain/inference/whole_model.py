"""Builds the model of a run and fills it with a checkpoint's weights, without reading the run's data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drivetrain.checkpoint.directory import load as load_checkpoint
from drivetrain.checkpoint.run_state import verify_weights
from drivetrain.config.run import RunConfig
from drivetrain.engines.auxiliary import without_attached
from drivetrain.engines.state import kept
from drivetrain.errors import problem
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.models.finished import finished_model, tokenizer_beside
from drivetrain.models.merged_adapters import merged
from drivetrain.objects.held import missing
from drivetrain.trust.named_code import refuse_named_code
from drivetrain.trust.remote_code import PERMISSIONS
from drivetrain.workloads.user_file import UserFile


def loaded_model(
    run: RunConfig,
    path: Path,
    model: nn.Module | None = None,
    adapter: str = "merge",
    trust: bool = False,
    quantised: bool = False,
) -> nn.Module:
    """Returns the run's model with the weights of the checkpoint at `path`, in fp32 on the CPU, evaluating.

    model: filled in place of one that is built. adapter: merge or keep. quantised: whether a base that the run keeps in
    4 or 8 bits is rounded to them here too, as the adapters were trained over it (merged, it is unpacked again); else
    it is taken as its folder has it. Raises UserError for weights of another model, and for Python that the run's
    folder names from outside the current one, unless trust is set.
    """
    if model is None:
        refuse_named_code(_without_training(run), run.folder, trust)
        if not trust:
            _refuse_code_beside(run, path)
    weights = without_attached(load_checkpoint(path, verify_weights)["model"])
    return _filled(run, path, model, weights, adapter, quantised).eval()


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


def _filled(
    run: RunConfig, path: Path, model: nn.Module | None, weights: dict[str, Tensor], adapter: str, quantised: bool
) -> nn.Module:
    made = model if model is not None else _made(run, path)
    if run.quantisation_aware is not None:
        FakeQuantiser(run.quantisation_aware).prepare(made)
    if run.adapter is not None:
        made = AdapterSet(run.adapter, run.workload.base, run.quantised_base if quantised else None).fit(made)
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
