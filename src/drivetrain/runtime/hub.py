"""Checks once whether the hub answers for a model: offline, Transformers would try file after file, each with
retries."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from drivetrain.errors import problem

SECONDS = 10.0  # to answer in
FIX = (
    "give a local folder (hf download ID --local-dir FOLDER, where there is a network), or HF_HOME with the model "
    "in it and HF_HUB_OFFLINE=1"
)


def ask_hub(name: str, field: str) -> None:
    """Raises UserError if the hub cannot be reached, and no file of the model is in its cache.

    A hub that answers in any way is left to Transformers.
    """
    reason = _unreachable(name)
    if reason is not None:
        raise problem(field, f"{name} is no folder here, and the hub cannot be reached: {reason}", FIX)


def refuse_out_of_reach(name: str, field: str, meant: Path | None = None) -> None:
    """Does the same before anything that takes seconds is imported, and says that it asks. Raises UserError too for a
    model that no cache holds where HF_HUB_OFFLINE keeps from asking. meant: a run that the user may have meant."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    hint = "" if meant is None else f"did you mean {meant}? Else "
    try:
        folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    except HFValidationError:
        why = f"{name} is no folder here, and no name that a model on the hub may have"
        raise problem(field, why, f"{hint}give the folder of a model or run, or a name on the hub") from None
    if folder.is_dir():
        return
    if constants.HF_HUB_OFFLINE:
        why = f"{name} is no folder here, nor a model in the hub's cache, and HF_HUB_OFFLINE keeps from asking the hub"
        raise problem(field, why, hint + FIX)
    asks = f"{name} is no folder here: asking the hub for it"
    print(asks if meant is None else f"{asks} (did you mean {meant}?)", file=sys.stderr, flush=True)
    reason = _unreachable(name)
    if reason is not None:
        raise problem(field, f"{name} is no folder here, and the hub cannot be reached: {reason}", hint + FIX)


@functools.cache
def _unreachable(name: str) -> str | None:
    """Returns why the hub cannot be reached, or None. Checked once a process for each model."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE:  # which Transformers obeys
        return None
    try:
        cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer.json"))
        if not cached:
            HfApi().model_info(name, timeout=SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return None
    except Exception as error:  # network errors have no class in common
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None
