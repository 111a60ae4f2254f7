from mmengine.hooks import CheckpointHook, LoggerHook
from mmengine.visualization import TensorboardVisBackend, Visualizer

max_steps = 1200
accumulative_counts = 4
lr = 4e-5

default_hooks = dict(
    logger=dict(type=LoggerHook, interval=20),
    checkpoint=dict(type=CheckpointHook, by_epoch=False, interval=100, max_keep_ckpts=-1),
)
visualizer = dict(type=Visualizer, vis_backends=[dict(type=TensorboardVisBackend)])
randomness = dict(seed=11, deterministic=True)
log_level = "INFO"
