"""Translates a YAML of `accelerate config` into fields of the run file: number of processes, precision, engine.

Keys: Accelerate 1.15's ClusterConfig, and the fsdp_config and deepspeed_config blocks within it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.config import deepspeed
from drivetrain.config.files import read_json
from drivetrain.config.translation import Handler, Translation, fated, field_of, if_on, translated

DRIVERS = {"NO": "ddp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
# what mixed_precision means: autocast under DDP, 16-bit copies of fp32 weights under FSDP and DeepSpeed
PRECISIONS = {
    "ddp": {"no": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"},
    "fsdp": {"no": "fp32", "bf16": "bf16-master"},
    "deepspeed": {"no": "fp32", "bf16": "bf16-master", "fp16": "fp16-master"},
}


TOGETHER = ("distributed_type", "mixed_precision", "num_processes", "num_machines")  # read with one another


def translate(raw: Mapping[str, Any]) -> Translation:
    """Translates a whole configuration. Its settings name the engine itself ("engine.name": "fsdp")."""
    into = Translation()
    kind = str(raw.get("distributed_type", "NO")).upper()
    name = DRIVERS.get(kind)
    if name is None:
        why = f"{kind} has no engine here; there are {', '.join(DRIVERS)}"
        into.note("distributed_type", "refused", why, alters=True)
        for key in raw.keys() - {"distributed_type"}:
            into.note(key, "refused", "so is distributed_type")
        return into
    into.set("distributed_type", "engine.name", name)
    given = {key: value for key, value in raw.items() if key not in TOGETHER}
    translated(given, {**KEYS, **_BLOCKS[name]}, into)
    _processes(raw, into)
    if "mixed_precision" in raw:
        _precision(name, str(raw["mixed_precision"] or "no").lower(), into)
    if name == "fsdp" and into.settings.get("engine.hybrid") == 0:
        into.settings["engine.hybrid"] = into.settings.get("processes")
    return into


def whole(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the configuration with the content of deepspeed_config_file in place of its path, which is relative to
    `folder`."""
    block = dict(raw.get("deepspeed_config") or {})
    file = block.get("deepspeed_config_file")
    if not isinstance(file, str):
        return dict(raw)
    near = folder / file
    return {
        **raw,
        "deepspeed_config": {**block, "deepspeed_config_file": read_json(near if near.exists() else Path(file))},
    }


def _processes(raw: Mapping[str, Any], into: Translation) -> None:
    """num_processes counts the processes of all machines."""
    counts = {key: raw[key] for key in ("num_machines", "num_processes") if raw.get(key) is not None}
    wrong = [key for key, count in counts.items() if not isinstance(count, int) or isinstance(count, bool)]
    for key in wrong:
        into.unreadable(key, counts[key])
    if wrong:
        return
    machines = max(1, counts.get("num_machines", 1))
    if "num_processes" in counts:
        into.set("num_processes", "processes", max(1, counts["num_processes"] // machines))
    if machines > 1:
        into.set("num_machines", "nodes", machines)


def _precision(driver: str, given: str, into: Translation) -> None:
    known = PRECISIONS[driver]
    if "precision" in into.settings:
        into.note("mixed_precision", "unneeded", "deepspeed_config_file says it")
    elif given in known:
        into.set("mixed_precision", "precision", known[given])
    elif given == "fp16":
        into.set("mixed_precision", "precision", "fp16-mixed", "autocast over fp32 parameters")
    elif given == "fp8" and driver != "deepspeed":
        into.set("mixed_precision", "precision", "fp8-mixed", "the first linear layer too; there it stays in 16 bits")
    elif given == "fp8":
        into.note("mixed_precision", "refused", "DeepSpeed has no fp8 here; take DDP or FSDP, or bf16", alters=True)
    else:
        into.note("mixed_precision", "later", f"{given} is not built yet")


# --- fsdp_config -----------------------------------------------------------------------------------------------------

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # 1 to 5 in old files


def _strategy(key: str, value: Any, into: Translation) -> None:
    text = str(value).upper()
    text = STRATEGIES[int(text) - 1] if text.isdigit() and 1 <= int(text) <= len(STRATEGIES) else text
    if text == "NO_SHARD":
        into.note(key, "refused", "nothing would be sharded; take ddp")
        return
    if text not in STRATEGIES:
        into.note(key, "refused", f"there are {', '.join(STRATEGIES)}")
        return
    into.set(key, "engine.reshard", text in ("FULL_SHARD", "HYBRID_SHARD"))
    if text.startswith("HYBRID"):
        into.settings["engine.hybrid"] = 0  # the processes of a node, known at the end


def _reshard(key: str, value: Any, into: Translation) -> None:
    """The key is a boolean since FSDP2; before, it was a strategy's name."""
    if str(value).lower() in ("true", "false"):
        into.set(key, "engine.reshard", str(value).lower() == "true")
    else:
        _strategy(key, value, into)


POLICY = "fsdp_auto_wrap_policy"


def _wrapping(key: str, value: Any, into: Translation) -> None:
    if value == "SIZE_BASED_WRAP":
        into.set(key, "engine.wrap", "size")
    elif value == "NO_WRAP":
        into.set(key, "engine.wrap", [])
    else:  # by class, which are named by a key of their own, or are the model's blocks
        into.settings["engine.wrap"] = "block"
        into.note(key, "mapped", "engine.wrap: block, or the classes that are named")


def _layers(key: str, value: Any, into: Translation) -> None:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value or [])
    if names and into.settings.get("engine.wrap", "block") == "block":
        into.set(key, "engine.wrap", names)
    else:
        into.note(key, "unneeded", f"{POLICY} does not go by class" if names else "it is empty")


_BY_ITSELF = fated("unneeded", "FSDP2 does it by itself")
_WHOLE = fated("unneeded", "checkpoints hold whole tensors, gathered one after the other")

FSDP: dict[str, Handler] = {
    "fsdp_version": fated("mapped", "FSDP2, which does what FSDP1 did"),
    "fsdp_sharding_strategy": _strategy,
    "fsdp_reshard_after_forward": _reshard,
    POLICY: _wrapping,
    "fsdp_transformer_layer_cls_to_wrap": _layers,
    "fsdp_min_num_params": field_of("engine.wrap_min_parameters"),
    "fsdp_offload_params": field_of("engine.offload"),
    "fsdp_activation_checkpointing": field_of("recompute"),
    "fsdp_activation_checkpointing_offload": if_on(field_of("offload_activations")),
    "fsdp_backward_prefetch": _BY_ITSELF,
    "fsdp_backward_prefetch_policy": _BY_ITSELF,
    "fsdp_forward_prefetch": _BY_ITSELF,
    "fsdp_use_orig_params": _BY_ITSELF,
    "fsdp_sync_module_states": fated("unneeded", "ranks start from one seed, or from the first rank's weights"),
    "fsdp_cpu_ram_efficient_loading": fated("unneeded", "engine=fsdp has meta=true for it"),
    "fsdp_state_dict_type": _WHOLE,
    "fsdp_ignored_modules": if_on(fated("refused", "a module that is not sharded")),
}


def _fsdp(key: str, value: Any, into: Translation) -> None:
    given = {name if name.startswith("fsdp_") else f"fsdp_{name}": v for name, v in (value or {}).items()}
    if POLICY in given:  # before what refines it
        given = {POLICY: given[POLICY], **given}
    translated(given, FSDP, into, f"{key}.")


# --- deepspeed_config ------------------------------------------------------------------------------------------------

DEEPSPEED: dict[str, Handler] = {
    "zero_stage": field_of("engine.stage"),
    "offload_optimizer_device": field_of("engine.offload_optimizer"),
    "offload_param_device": field_of("engine.offload_parameters"),
    "offload_optimizer_nvme_path": field_of("engine.nvme_path"),
    "offload_param_nvme_path": field_of("engine.nvme_path"),
    "gradient_accumulation_steps": fated("unneeded", deepspeed.DIVISION),
    "gradient_clipping": deepspeed.clipping,
    "zero3_init_flag": fated("unneeded", "the model is built, then sharded"),
    "zero3_save_16bit_model": fated("unneeded", "weights are gathered piece by piece when they are saved"),
    "deepspeed_hostfile": fated("unneeded", "--nodes, --node-rank and --rendezvous set it"),
    "deepspeed_multinode_launcher": fated("unneeded", "--nodes, --node-rank and --rendezvous set it"),
    "deepspeed_inclusion_filter": fated("unneeded", "CUDA_VISIBLE_DEVICES says it"),
    "deepspeed_exclusion_filter": fated("unneeded", "CUDA_VISIBLE_DEVICES says it"),
    "deepspeed_moe_layer_cls_names": if_on(fated("later", "mixtures of experts")),
}


def _deepspeed(key: str, value: Any, into: Translation) -> None:
    given = dict(value or {})
    inner = given.pop("deepspeed_config_file", None)
    if inner is not None:
        found = deepspeed.translate(inner)
        into.settings |= {**found.settings, "engine.config": inner}
        into.notes += found.notes
    translated(given, DEEPSPEED, into, f"{key}.")


# --- the whole -------------------------------------------------------------------------------------------------------

_LAUNCH = fated("unneeded", "--nodes, --node-rank and --rendezvous set it")
_TPU = if_on(fated("refused", "there are no TPUs here"))


def _gpus(key: str, value: Any, into: Translation) -> None:
    if value in (None, "all"):
        into.note(key, "unneeded", "all GPUs are used")
    else:
        into.note(key, "refused", f"set CUDA_VISIBLE_DEVICES={value}")


def _environment(key: str, value: Any, into: Translation) -> None:
    into.note(key, "unneeded" if value == "LOCAL_MACHINE" else "refused", f"runs start where they are told to: {value}")


def _compiled(key: str, value: Any, into: Translation) -> None:
    translated({name.removeprefix("dynamo_"): given for name, given in (value or {}).items()}, DYNAMO, into, f"{key}.")


def _backend(key: str, value: Any, into: Translation) -> None:
    backend = str(value).upper()
    if backend == "INDUCTOR":
        into.set(key, "compile", True)
    elif backend in ("NO", ""):
        into.note(key, "unneeded", "it is off")
    else:
        into.note(key, "refused", f"compile=true compiles with inductor, not {backend}")


_AS_ALWAYS = if_on(fated("refused", "compile=true compiles in the default way"))

DYNAMO: dict[str, Handler] = {
    "backend": _backend,
    "mode": lambda key, value, into: _AS_ALWAYS(key, value != "default", into),
    "use_fullgraph": _AS_ALWAYS,
    "use_dynamic": _AS_ALWAYS,
    "use_regional_compilation": _AS_ALWAYS,
}


def _fp8_backend(key: str, value: Any, into: Translation) -> None:
    if str(value).upper() == "AO":
        into.note(key, "unneeded", "fp8-mixed is torchao's")
    else:
        into.note(key, "changed", f"torchao's scales, taken anew from each tensor, in place of {value}'s")


_ANEW = fated("unneeded", "scales are taken anew from each tensor")

FP8: dict[str, Handler] = {
    "backend": _fp8_backend,
    "enable_fsdp_float8_all_gather": if_on(
        fated("unneeded", "weights are gathered as they are kept: the same numbers")
    ),
    "pad_inner_dim": if_on(fated("unneeded", "products are padded where they need it")),
    "fp8_format": fated("unneeded", "weights and inputs are e4m3, gradients e5m2"),
    **dict.fromkeys(("margin", "interval", "amax_history_length", "amax_compute_algorithm"), _ANEW),
    "use_autocast_during_eval": fated("unneeded", "it evaluates as it trains"),
    "override_linear_precision": fated("unneeded", "all three products of a layer are in fp8"),
    "optimization_level": fated("unneeded", "it is MS-AMP's"),
}


def _fp8(key: str, value: Any, into: Translation) -> None:
    translated(value, FP8, into, f"{key}.")


AXES = {"tp_size": "tp", "cp_size": "cp", "sp_size": "cp"}  # ranks that share a sample, as engine=mesh calls them


def _mesh(key: str, value: Any, into: Translation) -> None:
    """parallelism_config of FSDP2 states how many devices replicate and how many shard."""
    names = {name.removeprefix("parallelism_config_"): name for name in value or {}}
    given = {axis: value[name] for axis, name in names.items()}
    for axis, size in given.items():
        if axis == "dp_shard_size" and given.get("dp_replicate_size", 1) > 1:
            into.set(f"{key}.{names[axis]}", "engine.hybrid", size)
        elif axis.startswith("dp_") or size in (None, 1) or axis not in AXES:
            into.note(f"{key}.{names[axis]}", "unneeded", "processes says it" if "size" in axis else "it is off")
        else:
            into.note(f"{key}.{names[axis]}", "refused", deepspeed.UNSHARED.format(AXES[axis], size), alters=True)


def _on_cpu(key: str, value: Any, into: Translation) -> None:
    into.set(key, "device", "cpu" if str(value).lower() in ("true", "yes", "1") else "auto")


KEYS: dict[str, Handler] = {
    "compute_environment": _environment,
    "use_cpu": _on_cpu,
    "gpu_ids": _gpus,
    "machine_rank": _LAUNCH,
    "main_process_ip": _LAUNCH,
    "main_process_port": _LAUNCH,
    "rdzv_backend": _LAUNCH,
    "same_network": _LAUNCH,
    "main_training_function": fated("unneeded", "the run file sets what is trained"),
    "debug": fated("unneeded", "shapes that differ between ranks end the run"),
    "enable_cpu_affinity": fated("unneeded", "the system places the processes"),
    "downcast_bf16": _TPU,
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), _TPU),
    "command_file": _TPU,
    "commands": _TPU,
    "dynamo_config": _compiled,
    "dynamo_backend": _backend,
    "parallelism_config": if_on(_mesh),
    "fp8_config": if_on(_fp8),
    "megatron_lm_config": if_on(fated("refused", "Megatron-LM is no engine here")),
    "mpirun_config": if_on(fated("unneeded", "ranks are started by torch elastic")),
    "ipex_config": if_on(fated("unneeded", "PyTorch has taken it in")),
    "fsdp_config": if_on(fated("unneeded", "distributed_type is not FSDP")),
    "deepspeed_config": if_on(fated("unneeded", "distributed_type is not DEEPSPEED")),
}

_BLOCKS: dict[str, dict[str, Handler]] = {
    "ddp": {},
    "fsdp": {"fsdp_config": _fsdp},
    "deepspeed": {"deepspeed_config": _deepspeed},
}
