"""Engines spread a run over devices: one contract, one file an engine."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module

from drivetrain.config.engines import EngineConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine, EngineOptions


def build_engine(config: EngineConfig, options: EngineOptions, communicator: Communicator) -> Engine:
    module, _, cls = config.traits.implementation.partition(":")
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to where it is when imported; stdout is for results
        found = import_module(f"{__name__}.{module}")
    engine = getattr(found, cls)(config.driving, options, communicator)
    assert isinstance(engine, Engine)
    return engine
