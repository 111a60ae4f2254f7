"""Loads adapters by plain PEFT, over their base model."""

from __future__ import annotations

from pathlib import Path

import peft
import transformers

from drivetrain.export.runtimes.exchange import Answered, Asked, run
from drivetrain.export.runtimes.with_torch import answered


def answer(asked: Asked) -> Answered:
    assert asked.base is not None
    config = transformers.AutoConfig.from_pretrained(asked.base_config, trust_remote_code=asked.trusts)
    auto = getattr(transformers, asked.auto_class)
    base = auto.from_pretrained(
        asked.base,
        config=config,
        dtype="float32",
        trust_remote_code=asked.trusts,
        ignore_mismatched_sizes=True,  # a classifier's head is the adapter's
    )
    first, *others = (Path(asked.folder) / name for name in asked.adapters)
    names = ["default", *(path.name for path in others)]
    model = peft.PeftModel.from_pretrained(base, first, adapter_name=names[0], trust_remote_code=asked.trusts)
    for name, path in zip(names[1:], others, strict=True):
        model.load_adapter(path, adapter_name=name)
    if others:
        model.base_model.set_adapter(names)  # their products are summed
    return answered(model.eval(), asked, ("peft", "transformers", "torch"), digests=False)


if __name__ == "__main__":
    run(answer)
