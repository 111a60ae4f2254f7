# ruff: noqa: F403, F405
from mmengine.config import read_base
from mmengine.optim import AmpOptimWrapper, CosineAnnealingLR, LinearLR
from torch.optim import AdamW
from xtuner.engine.runner import TrainLoop

with read_base():
    from .base import *

per_device = 4
train_dataloader = dict(batch_size=per_device, num_workers=2, sampler=dict(shuffle=True))
optim_wrapper = dict(
    type=AmpOptimWrapper,
    optimizer=dict(type=AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
    accumulative_counts=accumulative_counts,
    dtype="bfloat16",
)
param_scheduler = [
    dict(type=LinearLR, start_factor=1 / 40, by_epoch=False, begin=0, end=0.05 * max_steps),
    dict(type=CosineAnnealingLR, eta_min=lr * 0.15, by_epoch=False, begin=0.05 * max_steps, T_max=0.95 * max_steps),
]
train_cfg = dict(type=TrainLoop, max_iters=max_steps, val_interval=max_steps // 4)
default_hooks["logger"]["interval"] = 40
work_dir = f"./work_dirs/from_base_{max_steps}"
