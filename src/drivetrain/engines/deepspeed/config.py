"""The JSON that DeepSpeed is started with: the run's settings, completed by the user's own JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.config.deepspeed import translate
from drivetrain.config.engines import DeepspeedEngine
from drivetrain.config.precision import Precision

BUCKET = 50_000_000  # most elements reduced at once; DeepSpeed's own 500 million cost 2 GB whatever the model's size
SMALLEST_BUCKET = 4_000_000  # below 16 MB what a reduction costs is its start
LIVE = 1_000_000_000  # DeepSpeed's own
PERSISTENT = (
    100_000  # stage 3 keeps smaller parameters whole: DeepSpeed's own bound, for a model of 100 million and more
)


def zero_json(
    block: DeepspeedEngine, precision: Precision, max_grad_norm: float | None, sizes: Sequence[int], on_gpu: bool
) -> dict[str, Any]:
    """Returns the JSON. sizes: elements of each parameter.

    Accumulation and the division by it stay out of DeepSpeed (one micro-batch a step, as far as it knows), and so does
    autocast: gradients are summed in fp32 under every precision.
    """
    total, largest = sum(sizes), max(sizes)
    bucket = max(largest, SMALLEST_BUCKET, min(BUCKET, total // 4))
    zero: dict[str, Any] = {
        "stage": block.stage,
        "reduce_bucket_size": min(total, bucket),
        "stage3_param_persistence_threshold": min(PERSISTENT, total // 1000),
        # gathered at once: DeepSpeed's own bounds would keep all of a model below a billion parameters whole
        "stage3_max_live_parameters": max(2 * largest, min(LIVE, total // 4)),
        "stage3_max_reuse_distance": max(2 * largest, min(LIVE, total // 4)),
        "sub_group_size": max(largest, min(LIVE, total // 4)),  # updated at once, with copies of its gradients
        "stage3_prefetch_bucket_size": min(BUCKET, total // 8),
    }
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm or 0.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
    }
    if precision.cast:
        made["bf16" if precision.compute == "bfloat16" else "fp16"] = {"enabled": True}
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    passed = translate(block.config).passed if block.config is not None else {}
    zero |= passed.pop("zero_optimization", {})
    for key in ("reduce_bucket_size", "allgather_bucket_size"):  # reserved in full, however small the model
        if isinstance(zero.get(key), int | float) and zero[key] > total:
            zero[key] = total
    for key, place in (("offload_optimizer", block.offload_optimizer), ("offload_param", block.offload_parameters)):
        if place != "none":
            path = {"nvme_path": str(block.nvme_path)} if place == "nvme" else {}
            zero[key] = {"device": place, "pin_memory": on_gpu, **path, **zero.get(key, {})}
    return {**passed, **made, "zero_optimization": zero}
