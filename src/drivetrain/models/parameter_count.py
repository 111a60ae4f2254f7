"""Counts the parameters of a Transformers model from its config, before anything is built."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.config.workload_block import WorkloadBlock
from drivetrain.models.auto_classes import imported_auto_class
from drivetrain.models.model_folders import config_of

DECIDED_BY_DATA = "vocab_size"  # the tokenizer's size where a run file's config leaves it out


@dataclass(frozen=True)
class ParameterCount:
    """linear: the weights among `all` that a quantised base holds as codes, at the most."""

    all: int
    linear: int


def count_parameters(workload: WorkloadBlock) -> ParameterCount | None:
    """Returns the number of parameters that the workload's model surely has.

    The model is made on PyTorch's meta device, which allocates nothing. None where the number is not known in this way:
    user code, hub ids, models whose class lies beside them, and configs that no model can be made from, which the real
    build reports.
    """
    if workload.described_model is None:
        return None
    path, config = workload.described_model.path, workload.described_model.config
    if path is not None and not Path(path).expanduser().joinpath("config.json").is_file():
        return None
    try:
        model = _without_numbers(workload.auto_class, path, config)
        unsure = (
            _decided_by_data(model)
            if config is not None and hasattr(model.config, DECIDED_BY_DATA) and DECIDED_BY_DATA not in config
            else set()
        )
    except Exception:  # each architecture fails in its own way; the build that follows says how
        return None
    sizes = {id(p): p.numel() for p in model.parameters() if id(p) not in unsure}
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    return ParameterCount(sum(sizes.values()), sum(size for key, size in sizes.items() if key in linear))


def _without_numbers(auto_class: str, path: str | None, config: dict[str, Any] | None) -> Any:
    auto = imported_auto_class(auto_class)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return auto.from_config(config_of(path, config, "workload.model"), dtype=torch.float32, trust_remote_code=False)


def _decided_by_data(model: Any) -> set[int]:
    """Returns the ids of the embeddings and of the head, which have a row a token."""
    found = (model.get_input_embeddings(), model.get_output_embeddings())
    return {id(parameter) for module in found if module is not None for parameter in module.parameters()}
