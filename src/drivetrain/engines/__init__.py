"""How a run is spread over devices: one contract, one file an engine."""

from __future__ import annotations

from importlib import import_module

from drivetrain.engines.base import Engine, EngineOptions

ENGINES = {
    "single": "drivetrain.engines.single:SingleEngine",
}


def build_engine(name: str, options: EngineOptions) -> Engine:
    module, _, cls = ENGINES[name].partition(":")
    engine = getattr(import_module(module), cls)(options)
    assert isinstance(engine, Engine)
    return engine
