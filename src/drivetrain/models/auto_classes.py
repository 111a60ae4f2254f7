"""Imports the classes of Transformers that build models."""

from __future__ import annotations

from typing import Any

from drivetrain.memory.garbage import importing


def imported_auto_class(name: str) -> Any:
    """Returns a class of Transformers that builds models with one kind of head, such as AutoModelForCausalLM.

    What all of its models need is imported with it. Python's collector of cycles takes no pass over it meanwhile, and
    none when the process ends.
    """
    with importing():
        import transformers
        import transformers.modeling_utils

        return getattr(transformers, name)
