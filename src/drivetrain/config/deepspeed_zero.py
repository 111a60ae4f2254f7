"""Translates the block zero_optimization of DeepSpeed's JSON: which state is sharded, and where it lies.

Keys: https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training
"""

from __future__ import annotations

from typing import Any

from drivetrain.config.translation import AUTO, Handler, Translation, fated, field_of, if_on, lost, translated

ALGORITHM = "it changes what is computed, and with it the result"


def _offload(to: str) -> Handler:
    def handle(key: str, value: Any, into: Translation) -> None:
        given = value or {}
        device = str(given.get("device", "none")).lower()
        into.set(f"{key}.device", to, device)
        if given.get("nvme_path") and device == "nvme":
            into.set(f"{key}.nvme_path", "engine.nvme_path", str(given["nvme_path"]))
        rest = {name: v for name, v in given.items() if name != "device" and (name, device) != ("nvme_path", "nvme")}
        for name in [name for name, v in rest.items() if v == AUTO or device == "none"]:
            into.note(
                f"{key}.{name}", "unneeded", "DeepSpeed's default" if device != "none" else "nothing is offloaded"
            )
            del rest[name]
        for name in sorted(rest):
            if name in ("super_offload", "ratio") and rest[name] not in (False, 1, 1.0):
                into.note(f"{key}.{name}", "refused", "it needs DeepSpeed's own optimizer")
                del rest[name]
        if rest:
            into.passed.setdefault("zero_optimization", {})[key.rsplit(".", 1)[-1]] = rest
            for name in rest:
                into.note(f"{key}.{name}", "passed", "to DeepSpeed")

    return handle


def _old_offload(to: str) -> Handler:
    return if_on(lambda key, _, into: into.set(key, to, "cpu"))


def _tuned(key: str, value: Any, into: Translation) -> None:
    into.passed.setdefault("zero_optimization", {})[key.rsplit(".", 1)[-1]] = value
    into.note(key, "passed", "to DeepSpeed")


def zero(key: str, value: Any, into: Translation) -> None:
    translated(value, ZERO, into, f"{key}.")


_GATHERED = fated("unneeded", "weights are gathered piece by piece when they are saved")
SAVING = fated("unneeded", "checkpoints are this project's")
ANOTHER = if_on(lost(ALGORITHM))
_TUNING = (
    *("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "sub_group_size", "round_robin_gradients"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "zero_hpz_partition_size"),
    *("memory_efficient_linear", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module"),
    *("ignore_unused_parameters", "parameter_alignment", "override_module_apply", "mics_shard_size"),
)

ZERO: dict[str, Handler] = {
    "stage": field_of("engine.stage"),
    "offload_optimizer": _offload("engine.offload_optimizer"),
    "offload_param": _offload("engine.offload_parameters"),
    "cpu_offload": _old_offload("engine.offload_optimizer"),
    "cpu_offload_params": _old_offload("engine.offload_parameters"),
    "cpu_offload_param": _old_offload("engine.offload_parameters"),
    "cpu_offload_use_pin_memory": fated("unneeded", "memory is pinned where there is a GPU"),
    **dict.fromkeys(_TUNING, _tuned),
    "stage3_gather_16bit_weights_on_model_save": _GATHERED,
    "stage3_gather_fp16_weights_on_model_save": _GATHERED,
    "load_from_fp32_weights": SAVING,
    "elastic_checkpoint": SAVING,
    "pipeline_loading_checkpoint": SAVING,
    "compute_grad_norm": fated("unneeded", "the norm is always computed"),
    "legacy_stage1": if_on(fated("refused", "DeepSpeed itself took it out")),
    "zero_quantized_weights": ANOTHER,
    "zero_quantized_nontrainable_weights": ANOTHER,
    "zero_quantized_gradients": ANOTHER,
    "zenflow": ANOTHER,
    "save_muon_momentum_buffer_in_memory": fated("unneeded", "there is no Muon"),
}
