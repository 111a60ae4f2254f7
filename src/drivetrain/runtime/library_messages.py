"""Messages that libraries print by themselves as soon as they are imported."""

from __future__ import annotations

import logging
import os

VERBOSE = "DRIVETRAIN_VERBOSE"  # an environment variable, so that a run's other processes show them too


def hush() -> None:
    """Silences what is no news to users, unless VERBOSE is set: torchao, which transformers imports wherever it is
    installed, warns of each kernel in its wheel for another Python or GPU, torch of operators that torchao registers,
    bitsandbytes of an optional package, and DeepSpeed, on stdout, that there is no GPU."""
    if os.environ.get(VERBOSE):
        return
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_news)  # its level is set when it is imported


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to")
