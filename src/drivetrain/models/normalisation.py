"""Replaces BatchNorm by GroupNorm: statistics of one sample instead of the batch, so that the cut of a batch does not
matter.

Wu and He 2018, "Group Normalization"; at most 32 groups as there.
"""

from __future__ import annotations

import torch
from torch import nn

MOST_GROUPS = 32


def has_batch_norm(model: nn.Module) -> bool:
    return any(map(is_batch_norm, model.modules()))


def keep_statistics(module: nn.Module) -> None:
    """Makes a BatchNorm normalise with its running statistics, in training too."""
    module.eval()
    module.train = lambda mode=True: module  # type: ignore[method-assign]  # noqa: ARG005  the signature of Module.train


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def batch_norm_to_group_norm(model: nn.Module) -> int:
    """Replaces every BatchNorm over images in place, gain and bias kept. Returns how many there were."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d | nn.SyncBatchNorm):
                setattr(module, name, _group_norm(child))
                count += 1
    return count


def _group_norm(batch_norm: nn.BatchNorm2d | nn.SyncBatchNorm) -> nn.GroupNorm:
    channels = batch_norm.num_features
    groups = max(n for n in range(1, min(MOST_GROUPS, channels) + 1) if channels % n == 0)
    if groups == channels:  # one channel a group would be instance normalisation, which forgets the channel's mean
        groups = max(1, channels // 4)
        groups = max(n for n in range(1, groups + 1) if channels % n == 0)
    norm = nn.GroupNorm(groups, channels, eps=batch_norm.eps, affine=batch_norm.affine)
    if batch_norm.affine:
        with torch.no_grad():
            norm.weight.copy_(batch_norm.weight)
            norm.bias.copy_(batch_norm.bias)
    return norm
