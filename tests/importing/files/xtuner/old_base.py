_base_ = ["./base.py"]

optim_wrapper = dict(
    type="OptimWrapper", optimizer=dict(type="SGD", lr=0.05, momentum=0.9), clip_grad=dict(max_norm=5.0, norm_type=2)
)
train_dataloader = dict(batch_size=16, num_workers=1)
train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=2)
val_dataloader = dict(batch_size=32)
val_cfg = dict(type="ValLoop")
model = dict(type="LLaVAModel", llm_lora=dict(r=8))
default_hooks = dict(checkpoint=dict(by_epoch=True, interval=1))
