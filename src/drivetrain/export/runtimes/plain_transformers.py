"""Loads a folder by plain Transformers."""

from __future__ import annotations

import transformers

from drivetrain.export.runtimes.exchange import Answered, Asked, run
from drivetrain.export.runtimes.with_torch import answered


def answer(asked: Asked) -> Answered:
    auto = getattr(transformers, asked.auto_class)
    model = auto.from_pretrained(asked.folder, dtype="auto", trust_remote_code=asked.trusts).eval()
    quantised = getattr(model.config, "quantization_config", None) is not None
    return answered(model, asked, ("transformers", "torch"), digests=not quantised)


if __name__ == "__main__":
    run(answer)
