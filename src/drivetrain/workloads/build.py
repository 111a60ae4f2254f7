"""The run file's workload block → a workload."""

from __future__ import annotations

from importlib import import_module

from drivetrain.config.workload import Workload as WorkloadConfig
from drivetrain.workloads.base import Workload

WORKLOADS = {
    "image_classification": "drivetrain.workloads.image_classification:ImageClassificationWorkload",
    "text_classification": "drivetrain.workloads.text_classification:TextClassificationWorkload",
    "language_model": "drivetrain.workloads.language_model:LanguageModelWorkload",
    "module": "drivetrain.workloads.user_module:UserModuleWorkload",
}


def build_workload(config: WorkloadConfig, seed: int) -> Workload:
    """Read and check the data. UserError with all that is wrong with them."""
    module, _, cls = WORKLOADS[config.type].partition(":")
    workload = getattr(import_module(module), cls)(config, seed)
    assert isinstance(workload, Workload)
    return workload
