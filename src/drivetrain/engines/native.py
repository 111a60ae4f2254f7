"""DeepSpeed made ready to start without compiling anything, or with one build that is told and never left half done."""

from __future__ import annotations

import logging
import warnings

import torch.distributed as dist

from drivetrain.errors import RunError, problem


def deepspeed_ready() -> None:
    """Import DeepSpeed and have it join the process group that there is."""
    try:
        import deepspeed
    except ImportError as error:
        raise problem(
            "engine", f"deepspeed cannot be imported: {error}", "pip install 'drivetrain[deepspeed]'"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 has new names for what DeepSpeed 0.19 calls in every step
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)
    if not dist.is_initialized():
        raise RunError("engine=deepspeed was asked for, but this process belongs to no group of ranks")
    # collectives go through gloo or NCCL; its own shared-memory ones would be compiled for minutes at the first start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
