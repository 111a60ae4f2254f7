"""Sets environment variables: no other part of the project sets any, except the PATH to a compiler's ninja."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from drivetrain.config.run import RunConfig
from drivetrain.runtime.hardware import usable_cores

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

# torch's flight recorder remembers so many collectives: its default by now, and none in some backends
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}

# How many kernels oneDNN keeps, and PyTorch in front of it: 1,024 each by default, one for every shape that was met.
# Batches of texts have ever other lengths, so that most are never used again, yet they come to more than half of what
# a small model holds (docs/background/speed.md). A Transformer takes some twenty kernels at one length, all its blocks
# together.
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}

# without it cuBLAS may sum in another order in each run, and PyTorch refuses products under deterministic: true
REPEATABLE_PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

QUIET_PROFILER = {"KINETO_LOG_LEVEL": "99"}  # torch's profiler writes its stages to stderr


def of_the_run(run: RunConfig, device: str) -> dict[str, str]:
    """Returns the variables for DeepSpeed, Accelerate, Transformers, oneDNN and cuBLAS. device: "cpu" or "cuda"."""
    wanted = {"DISABLE_SAFETENSORS_CONVERSION": "1"}  # Transformers would ask the hub to convert pickled weights
    wanted |= run.engine.environment(device, usable_cores())
    if device == "cuda" and run.deterministic:
        wanted |= REPEATABLE_PRODUCTS
    if device == "cpu" and run.workload.lengths_vary and not KERNELS.keys() & os.environ:
        wanted |= KERNELS
    return wanted


@contextmanager
def variables(added: Mapping[str, str]) -> Iterator[None]:
    """Sets variables while the block runs, unless the user has set them."""
    own = {name: value for name, value in added.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
