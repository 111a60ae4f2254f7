"""A few numbers in place of a whole gradient, which add up over samples and ranks as gradients do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FOLDS = 61  # sums that are compared of a gradient: a prime, so that rows and columns mix
AT_ONCE = 4096 * FOLDS  # numbers that become float64 at once, and stay in a core's cache meanwhile
NOTHING = torch.zeros(FOLDS + 1, dtype=torch.float64)


def sketch(gradient: Tensor) -> Tensor:
    """(FOLDS + 1,), float64, on the CPU: sums over every FOLDS-th number, and the norm.

    Part by part: torch's own sum and norm in float64 over all numbers take twelve times as long on a CPU.
    """
    flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().flatten()
    folded = torch.zeros(FOLDS, dtype=torch.float64, device=flat.device)
    square = torch.zeros((), dtype=torch.float64, device=flat.device)
    for part in flat.split(AT_ONCE):
        numbers = F.pad(part.double(), (0, -len(part) % FOLDS))
        square += numbers.dot(numbers)
        folded += numbers.view(-1, FOLDS).sum(0)
    return torch.cat([folded, square.sqrt()[None]]).cpu()
