"""Builds a model from a checkpoint's folder, without the data it was trained on and still without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.config.workload_block import ModelBlock, WorkloadBlock
from drivetrain.models.auto_classes import imported_auto_class
from drivetrain.models.language_options import rope_scaling_config
from drivetrain.models.model_folders import config_at, config_of
from drivetrain.models.normalisation import batch_norm_to_group_norm
from drivetrain.models.preprocessing import NORM_KEY
from drivetrain.models.transformers_classifiers import build_classifier

FIELD = "workload.model"


def finished_model(workload: WorkloadBlock, folder: Path, of_a_base: bool) -> nn.Module:
    """Returns the model in fp32 on the CPU, without its weights.

    folder: a checkpoint. of_a_base: whether it holds an adapter alone; the rest is then the base's own, from the path
    that the run file names. Raises UserError for a model that cannot be built.
    """
    auto, options = workload.auto_class, _model_of(workload)
    if of_a_base:
        described = json.loads((folder / "base_config.json").read_text(encoding="utf-8"))
        model = _base(auto, workload, described)
    else:
        config = config_at(str(folder), FIELD, options.trust_remote_code)
        described = config.to_dict()
        model = imported_auto_class(auto).from_config(
            config, dtype=torch.float32, trust_remote_code=options.trust_remote_code
        )
    if described.get(NORM_KEY) == "group":
        batch_norm_to_group_norm(model)
    return model


def _base(auto: str, workload: WorkloadBlock, described: dict[str, Any]) -> nn.Module:
    options = _model_of(workload)
    overrides: dict[str, Any] = {}
    if workload.rope_scaling is not None:
        config = config_of(options.path, None, FIELD, options.trust_remote_code)
        overrides = rope_scaling_config(config, workload.rope_scaling)
    names = described.get("id2label") or {}
    labels = [] if workload.is_causal else [names[key] for key in sorted(names, key=int)]
    if not workload.is_causal and described.get("pad_token_id") is not None:  # by which a scorer finds the last token
        overrides["pad_token_id"] = described["pad_token_id"]
    trusted = options.trust_remote_code
    return build_classifier(
        auto, options.path, None, labels, FIELD, lambda _: None, overrides=overrides, trusted=trusted
    )


def tokenizer_beside(folder: Path, workload: WorkloadBlock) -> Any:
    """Returns the tokenizer in a checkpoint's folder. The workload has one."""
    from transformers import AutoTokenizer

    trusted = getattr(_model_of(workload), "trust_tokenizer_code", False)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)


def _model_of(workload: WorkloadBlock) -> ModelBlock:
    found = workload.described_model
    assert found is not None, "a model of the user's own code is built by that code"
    return found
