"""The optimizers as data: where each class is, which fields of the run file it reads, and what its update needs.

An optimizer of a short name is an entry of KINDS. A class that a run file names by its import path is answered for by
the entry of the same class, or by what is known of its algorithm and its package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drivetrain.config.precision import FP8_FROM

ADAMS = frozenset({"betas", "eps"})


@dataclass(frozen=True)
class OptimizerKind:
    """The properties of an optimizer, whatever its settings."""

    name: str
    path: str  # module:class
    reads: frozenset[str] = ADAMS  # which of momentum, betas and eps
    states: int = 0  # tensors of a parameter's size that it keeps; 0: fewer, or not known
    fuses: bool = False  # torch has an update of all parameters in one call
    whole_tensors: bool = False  # the update of a number depends on others of its tensor
    low_bit: bool = False  # its state is codes and a scale for each block of them
    needs_gpu: bool = False  # it moves its state between a GPU and main memory
    compute_capability: tuple[int, int] = (0, 0)  # of a GPU

    @property
    def package(self) -> str:
        return self.path.replace(":", ".").partition(".")[0]

    @property
    def is_torchs(self) -> bool:
        return self.package == "torch"


KINDS: dict[str, OptimizerKind] = {
    kind.name: kind
    for kind in (
        OptimizerKind("sgd", "torch.optim:SGD", frozenset({"momentum"}), fuses=True),
        OptimizerKind("adam", "torch.optim:Adam", states=2, fuses=True),
        OptimizerKind("adamw", "torch.optim:AdamW", states=2, fuses=True),
        OptimizerKind("adafactor", "torch.optim:Adafactor", frozenset(), whole_tensors=True),
        OptimizerKind("adamw8bit", "torchao.optim:AdamW8bit", low_bit=True),
        OptimizerKind("adamw4bit", "torchao.optim:AdamW4bit", low_bit=True),
        OptimizerKind("adamw-fp8", "torchao.optim:AdamWFp8", low_bit=True, compute_capability=FP8_FROM),
        OptimizerKind("bnb-adamw8bit", "bitsandbytes.optim:AdamW8bit", low_bit=True),
        OptimizerKind("bnb-paged-adamw8bit", "bitsandbytes.optim:PagedAdamW8bit", low_bit=True, needs_gpu=True),
        OptimizerKind("galore", "pytorch_optimizer:GaLore", whole_tensors=True),
    )
}
# algorithms of any package, by their class's name: rows and columns, norms, orthogonal factors of whole tensors
WHOLE_TENSORS = {
    *("adafactor", "adamini", "came", "galore", "galoreadamw", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"),
}
STATES = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2, "adadelta": 2, "adagrad": 1, "rmsprop": 1}
LOW_BIT_PACKAGES = ("torchao", "bitsandbytes")


def kind_of(name: str) -> OptimizerKind:
    """Returns what is known of an optimizer that a run file names: by a short name, or as package.module:Class."""
    if name in KINDS:
        return KINDS[name]
    path = name.replace(":", ".")
    listed = next((kind for kind in KINDS.values() if kind.path.replace(":", ".") == path), None)
    if listed is not None:
        return replace(listed, name=name)
    called = path.rpartition(".")[2]
    found = OptimizerKind(name, name, states=STATES.get(called.lower(), 0))
    if path.startswith(LOW_BIT_PACKAGES) or "8bit" in path:
        fp8 = FP8_FROM if "Fp8" in called else (0, 0)
        return replace(found, low_bit=True, needs_gpu="Paged" in called, compute_capability=fp8)
    return replace(found, whole_tensors=called.lower() in WHOLE_TENSORS)
