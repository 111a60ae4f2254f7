"""How a run is spread over devices: one contract, one file an engine."""

from __future__ import annotations

from importlib import import_module

from drivetrain.config.engine import EngineConfig
from drivetrain.engines.base import Engine, EngineOptions
from drivetrain.ranks import Ranks

ENGINES = {
    "single": "drivetrain.engines.single:SingleEngine",
    "dp": "drivetrain.engines.dp:DpEngine",
    "ddp": "drivetrain.engines.ddp:DdpEngine",
    "fsdp": "drivetrain.engines.fsdp:FsdpEngine",
}


def build_engine(config: EngineConfig, options: EngineOptions, ranks: Ranks) -> Engine:
    module, _, cls = ENGINES[config.name].partition(":")
    engine = getattr(import_module(module), cls)(config, options, ranks)
    assert isinstance(engine, Engine)
    return engine
