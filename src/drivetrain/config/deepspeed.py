"""Translates DeepSpeed's own JSON: each key becomes a field of the run file, is passed on to DeepSpeed, or is refused
with the reason.

Keys: https://www.deepspeed.ai/docs/config-json/ and DeepSpeed 0.19's configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.config.deepspeed_zero import ANOTHER, SAVING, zero
from drivetrain.config.translation import AUTO, Handler, Translation, fated, field_of, if_on, lost, translated

DIVISION = "batch_size and micro_batch_size decide how a batch is cut; DeepSpeed's own division is switched off"
TRACKING = "give tracking.trackers"
UNSHARED = "each rank of this engine has samples of its own: take engine: {{name: mesh, {}: {}}}"


def translate(raw: Mapping[str, Any]) -> Translation:
    into = Translation()
    _batch(raw, into)
    translated({key: value for key, value in raw.items() if key not in BATCH}, KEYS, into)
    return into


# --- batch -----------------------------------------------------------------------------------------------------------

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch(raw: Mapping[str, Any], into: Translation) -> None:
    """train_batch_size = micro-batch x accumulation x ranks: two of the three are enough."""
    whole, micro, steps = (raw[key] if _is_number(raw.get(key)) else None for key in BATCH)
    for key in BATCH:
        if raw.get(key) == AUTO:
            into.note(key, "mapped", "auto: the run file's value")
        elif key in raw and not _is_number(raw[key]):
            into.unreadable(key, raw[key])
    if whole is not None:
        into.set(BATCH[0], "batch_size", whole)
    if micro is not None:
        into.set(BATCH[1], "micro_batch_size", micro)
    if whole is None and micro is not None and raw.get(BATCH[0]) != AUTO:
        into.set(BATCH[2], "batch_size_per_device", micro * (steps or 1))
    elif steps is not None:
        into.note(BATCH[2], "unneeded", DIVISION)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- precision -------------------------------------------------------------------------------------------------------


def _half(precision: str) -> Handler:
    def handle(key: str, value: Any, into: Translation) -> None:
        enabled = value.get("enabled", False)
        if enabled == AUTO:
            into.note(f"{key}.enabled", "mapped", "auto: the run file's precision")
        elif enabled:
            into.set(f"{key}.enabled", "precision", precision)
        rest = {name: given for name, given in value.items() if name != "enabled"}
        if enabled:
            translated(rest, HALF, into, f"{key}.")
        else:
            for name in value:
                into.note(f"{key}.{name}", "unneeded", f"{key} is not enabled")

    return handle


def _scale_power(key: str, value: Any, into: Translation) -> None:
    into.set(key, "scaler.init_scale", 2.0**value)


def _static_scale(key: str, value: Any, into: Translation) -> None:
    if value:
        into.note(key, "refused", "a loss scale that never changes; the scale is dynamic here")
    else:
        into.note(key, "unneeded", "0 means dynamic, which it is")


HALF: dict[str, Handler] = {
    "loss_scale": _static_scale,
    "initial_scale_power": _scale_power,
    "loss_scale_window": field_of("scaler.growth_interval"),
    "hysteresis": fated("unneeded", "the scale falls at the first overflow"),
    "consecutive_hysteresis": fated("unneeded", "the scale falls at the first overflow"),
    "min_loss_scale": fated("unneeded", "a scale that falls too low ends the run with the reason"),
    "auto_cast": fated("unneeded", "floating inputs are cast"),
    "immediate_grad_update": fated("unneeded", "gradients are accumulated in fp32"),
    "check_grad_overflow": fated("unneeded", "losses and norms are checked here"),
    "fp16_master_weights_and_grads": if_on(fated("refused", "master weights are kept in fp32")),
    "bf16_master_weights_and_grads": if_on(fated("refused", "master weights are kept in fp32")),
    "bf16_optimizer_states": if_on(fated("refused", "the optimizer's state is kept in fp32")),
}


def _autocast(key: str, value: Any, into: Translation) -> None:
    if not value.get("enabled"):
        into.note(key, "unneeded", "it is off")
        return
    halves = ("fp16", "float16", "half", "torch.float16")
    into.set(f"{key}.enabled", "precision", "fp16-mixed" if value.get("dtype") in halves else "bf16-mixed")
    handlers = {
        "dtype": fated("mapped", "the precision names it"),
        "lower_precision_safe_modules": fated("unneeded", "autocast keeps its own list of operators"),
        "fp32_grad_accum_dtype": fated("unneeded", "gradients are summed in fp32"),
    }
    translated({name: given for name, given in value.items() if name != "enabled"}, handlers, into, f"{key}.")


# --- optimizer and schedule ------------------------------------------------------------------------------------------


def _optimizer(key: str, value: Any, into: Translation) -> None:
    params = dict(value.get("params") or {})
    name = str(value.get("type", "")).lower()
    if name == "adam" and params.get("adam_w_mode", True):
        into.set(f"{key}.type", "optimizer.name", "adamw", "DeepSpeed's Adam decays as AdamW unless adam_w_mode is off")
    elif name in ("adam", "adamw", "sgd"):
        into.set(f"{key}.type", "optimizer.name", name)
    else:
        into.note(f"{key}.type", "refused", "name a torch optimizer by its import path in optimizer.name", alters=True)
        _left_with_type(key, params, into)
        return
    translated(params, OPTIMIZER, into, f"{key}.params.")
    if "legacy_fusion" in value:
        into.note(f"{key}.legacy_fusion", "unneeded", "the update is torch's")


def _left_with_type(key: str, params: Mapping[str, Any], into: Translation) -> None:
    for name in params:
        into.note(f"{key}.params.{name}", "unneeded", f"{key}.type is refused")


def clipping(key: str, value: Any, into: Translation) -> None:
    """A value of 0 means no clipping."""
    into.set(key, "loop.max_grad_norm", value or None)


def _weight_decay(key: str, value: Any, into: Translation) -> None:
    into.set(key, "optimizer.weight_decay", value, "biases and normalisation weights are left out")


OPTIMIZER: dict[str, Handler] = {
    "lr": field_of("optimizer.lr"),
    "betas": field_of("optimizer.betas"),
    "eps": field_of("optimizer.eps"),
    "momentum": field_of("optimizer.momentum"),
    "weight_decay": _weight_decay,
    "adam_w_mode": fated("unneeded", "optimizer.name says it"),
    "torch_adam": fated("unneeded", "the update is torch's, which needs no build"),
    "fused": fated("unneeded", "the fused kernel is taken where there is one"),
    "bias_correction": fated("unneeded", "moments are corrected"),
    "amsgrad": if_on(field_of("optimizer.options.amsgrad")),
    "nesterov": if_on(field_of("optimizer.options.nesterov")),
    "max_grad_norm": clipping,
}

SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _scheduler(key: str, value: Any, into: Translation) -> None:
    kind, params = str(value.get("type", "")), dict(value.get("params") or {})
    if kind not in SHAPES:
        into.note(f"{key}.type", "refused", f"there are {', '.join(SHAPES)}, as schedule.name", alters=True)
        _left_with_type(key, params, into)
        return
    into.set(f"{key}.type", "schedule.name", SHAPES[kind])
    translated(params, SCHEDULER, into, f"{key}.params.")
    if "warmup_type" not in params:
        _rising(f"{key}.params.warmup_type", "log", into)


def _rising(key: str, value: Any, into: Translation) -> None:
    if value == "linear":
        into.note(key, "unneeded", "the rate rises linearly")
    else:
        into.note(key, "changed", "the rate rises linearly, not by a logarithm")


SCHEDULER: dict[str, Handler] = {
    "warmup_num_steps": field_of("schedule.warmup_steps"),
    "total_num_steps": field_of("loop.steps"),
    "cos_min_ratio": field_of("schedule.final_lr_ratio"),
    "warmup_max_lr": field_of("optimizer.lr"),
    "warmup_min_lr": fated("unneeded", "the rate rises from above 0"),
    "warmup_min_ratio": fated("unneeded", "the rate rises from above 0"),
    "warmup_type": _rising,
    "last_batch_iteration": fated("unneeded", "a resumed run knows its step"),
}


# --- the whole -------------------------------------------------------------------------------------------------------


def _passed(key: str, value: Any, into: Translation) -> None:
    into.passed[key] = value
    into.note(key, "passed", "to DeepSpeed")


def _shared(axis: str) -> Handler:
    """Returns how many ranks share a sample; 1 if each has samples of its own."""

    def handle(key: str, value: Any, into: Translation) -> None:
        if value in (0, 1):
            into.note(key, "unneeded", "it is off")
        else:
            into.note(key, "refused", UNSHARED.format(axis, value), alters=True)

    return handle


def _tensor_parallel(key: str, value: Any, into: Translation) -> None:
    rest = dict.fromkeys(value, fated("unneeded", "the plan is the model's"))
    translated(value, {**rest, "autotp_size": _shared("tp")}, into, f"{key}.")


def _reduced_in(key: str, value: Any, into: Translation) -> None:
    if value in (None, "fp32"):
        into.note(key, "unneeded", "gradients are summed in fp32")
    else:
        into.note(key, "refused", f"gradients are summed in fp32; {value} would round the sums")


KEYS: dict[str, Handler] = {
    "gradient_clipping": clipping,
    "optimizer": if_on(_optimizer),
    "scheduler": if_on(_scheduler),
    "fp16": _half("fp16-master"),
    "bf16": _half("bf16-master"),
    "bfloat16": _half("bf16-master"),
    "torch_autocast": _autocast,
    "zero_optimization": zero,
    "communication_data_type": _reduced_in,
    "data_types": fated("unneeded", "gradients are accumulated and summed in fp32"),
    "fp32_allreduce": fated("unneeded", "gradients are summed in fp32"),
    "gradient_allreduce_op": fated("unneeded", "losses are normalised by the targets of the global batch"),
    "prescale_gradients": _passed,
    "gradient_predivide_factor": _passed,
    "aio": _passed,
    "wall_clock_breakdown": _passed,
    "memory_breakdown": _passed,
    "comms_logger": _passed,
    "dump_state": _passed,
    "disable_python_gc": _passed,
    "activation_checkpointing": fated("unneeded", "it is for models that call DeepSpeed's own; give recompute=true"),
    "managed_gradient_accumulation": fated("unneeded", DIVISION),
    "steps_per_print": fated("unneeded", "tracking.log_every says it"),
    "log_level": fated("unneeded", "only DeepSpeed's errors are shown"),
    "zero_allow_untested_optimizer": fated("unneeded", "it is always allowed"),
    "zero_force_ds_cpu_optimizer": fated("unneeded", "the update is torch's, which needs no build"),
    "dataloader_drop_last": fated("unneeded", "every sample counts once"),
    "flops_profiler": fated("unneeded", "the report has FLOPs"),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), if_on(fated("unneeded", TRACKING))),
    "checkpoint": SAVING,
    "load_universal_checkpoint": SAVING,
    "use_node_local_storage": SAVING,
    "amp": if_on(lost("Apex is gone from DeepSpeed; give precision=fp16-mixed or bf16-mixed")),
    **dict.fromkeys(("sparse_gradients", "sparse_attention", "compression_training"), ANOTHER),
    **dict.fromkeys(("curriculum_learning", "data_efficiency"), if_on(lost("it changes what a batch holds"))),
    "autotuning": if_on(fated("refused", "drivetrain compare measures settings side by side")),
    "elasticity": if_on(fated("refused", "min_nodes and max_restarts say it; the batch stays the same", alters=True)),
    "tensor_parallel": if_on(_tensor_parallel),
    "sequence_parallel_size": _shared("cp"),
    "pipeline": if_on(fated("refused", "take engine: {name: mesh, pp: N}", alters=True)),
    "compile": if_on(fated("refused", "give compile=true in the run file")),
    "hybrid_engine": if_on(
        fated("refused", "answers to learn from are made by the project itself: workload.stage=grpo, rloo or ppo")
    ),
}
