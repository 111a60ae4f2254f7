"""Builds the workload of the run file's workload block."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from drivetrain.config.adapter import Adapter
from drivetrain.config.quantisation_aware import QuantisationAware
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.workload import Workload as WorkloadConfig
from drivetrain.memory.garbage import importing
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.workloads.base import Workload


def build_workload(
    config: WorkloadConfig,
    seed: int,
    adapters: Sequence[Adapter] | None = None,
    quantised_base: QuantisedBase | None = None,
    quantisation_aware: QuantisationAware | None = None,
) -> Workload:
    """Reads and checks the data. Raises UserError with all their problems."""
    chosen = AdapterSet(adapters, config.base, quantised_base) if adapters else None
    fake_quantiser = None if quantisation_aware is None else FakeQuantiser(quantisation_aware)
    module, _, cls = config.implementation.partition(":")
    with importing():
        kind = getattr(import_module(module), cls)
    workload = kind(config, seed)
    assert isinstance(workload, Workload)
    workload.adapters, workload.fake_quantiser = chosen, fake_quantiser
    return workload
