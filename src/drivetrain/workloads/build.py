"""Builds the workload of the run file's workload block."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from drivetrain.config.adapter import Adapter
from drivetrain.config.quantisation_aware import QuantisationAware
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.workload import OwnCode
from drivetrain.config.workload import Workload as WorkloadConfig
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.workloads.base import Workload

WORKLOADS = {
    "image_classification": "drivetrain.workloads.image_classification:ImageClassificationWorkload",
    "text_classification": "drivetrain.workloads.text_classification:TextClassificationWorkload",
    "language_model: pretrain": "drivetrain.workloads.language_model:LanguageModelWorkload",
    "language_model: sft": "drivetrain.workloads.language_model:LanguageModelWorkload",
    "module": "drivetrain.workloads.user_module:UserModuleWorkload",
    "objects": "drivetrain.workloads.user_objects:UserObjectsWorkload",
}


def build_workload(
    config: WorkloadConfig,
    seed: int,
    adapters: Sequence[Adapter] | None = None,
    quantised_base: QuantisedBase | None = None,
    quantisation_aware: QuantisationAware | None = None,
) -> Workload:
    """Reads and checks the data. Raises UserError with all their problems."""
    base = None if isinstance(config, OwnCode) else config.model.path
    chosen = AdapterSet(adapters, base, quantised_base) if adapters else None
    fake_quantiser = None if quantisation_aware is None else FakeQuantiser(quantisation_aware)
    module, _, cls = WORKLOADS[config.implementation].partition(":")
    workload = getattr(import_module(module), cls)(config, seed)
    assert isinstance(workload, Workload)
    workload.adapters, workload.fake_quantiser = chosen, fake_quantiser
    return workload
