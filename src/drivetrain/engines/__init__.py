"""How a run is spread over devices: one contract, one file an engine."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module

from drivetrain.config.engine import EngineConfig, driving
from drivetrain.engines.base import Engine, EngineOptions
from drivetrain.ranks import Ranks

ENGINES = {
    "single": "drivetrain.engines.single:SingleEngine",
    "dp": "drivetrain.engines.dp:DpEngine",
    "ddp": "drivetrain.engines.ddp:DdpEngine",
    "fsdp": "drivetrain.engines.fsdp:FsdpEngine",
    "deepspeed": "drivetrain.engines.deepspeed:DeepspeedEngine",
    "mesh": "drivetrain.engines.mesh:MeshEngine",
    "accelerate-ddp": "drivetrain.engines.accelerate:AccelerateDdp",
    "accelerate-fsdp": "drivetrain.engines.accelerate:AccelerateFsdp",
    "accelerate-deepspeed": "drivetrain.engines.accelerate:AccelerateDeepspeed",
}


def build_engine(config: EngineConfig, options: EngineOptions, ranks: Ranks) -> Engine:
    driver = driving(config)
    key = config.name if driver is config else f"{config.name}-{driver.name}"
    module, _, cls = ENGINES[key].partition(":")
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to where it is when imported; stdout is for results
        found = import_module(module)
    engine = getattr(found, cls)(driver, options, ranks)
    assert isinstance(engine, Engine)
    return engine
