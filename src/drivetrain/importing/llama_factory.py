"""Translates a LLaMA-Factory YAML: TrainingArguments, and its own keys of model, data and method.

Keys: the argument classes of LLaMA-Factory 0.9, https://llamafactory.readthedocs.io
"""

from __future__ import annotations

from drivetrain.config.translation import Handler, fated, if_on, lost
from drivetrain.errors import problem
from drivetrain.importing import (
    llama_adapter,
    llama_commands,
    llama_language,
    llama_losses,
    llama_model,
    llama_optimizer,
    llama_preferences,
    llama_reinforcement,
    training_arguments,
)
from drivetrain.importing.key_reader import KeyReader, in_turn
from drivetrain.importing.llama_weights import has_adapter
from drivetrain.importing.training_keys import KEYS as TRAINING_KEYS
from drivetrain.importing.training_keys import TOGETHER as TRAINED_TOGETHER
from drivetrain.importing.translated_file import Default, Source, TranslatedFile

GENERATING = "drivetrain predict, chat and serve generate: their options and workload.generate say how"
EXPORT = "drivetrain export RUN --to transformers"
GPTQ = f"it is GPTQ; {EXPORT} --quantise int8, or int4, rounds without data"
FP8 = ("fp8_backend", "fp8_enable_fsdp_float8_all_gather")
OF_WORKLOAD = (*llama_model.KEYS, *llama_model.TOGETHER, *llama_adapter.TOGETHER)
OF_WORKLOAD = (*OF_WORKLOAD, *llama_losses.KEYS, *llama_preferences.KEYS, *llama_reinforcement.KEYS)
UNREADABLE = llama_language.Unwritten("stage", "refused", "a value that decides it cannot be read")


def translate(source: Source, driver: str | None) -> TranslatedFile:
    """Translates the workload too, if it can be trained here; else its keys are reported with the reason."""
    if llama_commands.only_answers(source.raw):
        return llama_commands.translated(source, (*TRAINING_KEYS, *TRAINED_TOGETHER, *KEYS, *TOGETHER))
    found = TranslatedFile(source)
    given = KeyReader(source.raw, found, source.prefix)
    of_training = training_arguments.groups(driver)
    others = [llama_optimizer.optimizer if group is training_arguments.optimizer else group for group in of_training]
    in_turn(given, [lambda given: _precision(given, driver), *others[1:], _recompute, _early_stopping])
    looked_at = KeyReader(source.raw, found, source.prefix)  # what is asked here is not used up
    why: list[llama_language.Unwritten | None] = []
    in_turn(looked_at, [lambda given: why.append(llama_language.unwritten(given))])
    handlers: dict[str, Handler] = {**TRAINING_KEYS, **KEYS, **llama_model.KEYS}
    if why and why[0] is None:
        in_turn(given, llama_language.groups())
    else:
        handlers |= _unwritten(why[0] if why and why[0] is not None else UNREADABLE)
    given.rest(handlers)
    return found


def _precision(given: KeyReader, driver: str | None) -> None:
    """Translates pure_bf16: everything is kept and computed in bf16."""
    if _fp8(given, driver):
        given.off("bf16", "fp16", "tf32", "pure_bf16", why="fp8 says it")
        return
    if not given.switch("pure_bf16"):
        given.off("pure_bf16")
        frozen = (
            "frozen weights that are not quantised are in fp32 (LLaMA-Factory keeps them in 16 bits)"
            if has_adapter(given)
            else ""
        )
        training_arguments.precision(given, driver, frozen)
        return
    if given.switch("fp16"):
        raise problem(f"{given.prefix}pure_bf16", "pure_bf16 and fp16 are both on", "keep one of the two")
    if driver == "deepspeed":
        given.set("pure_bf16", "precision", "bf16-master", "DeepSpeed keeps its own weights in fp32")
    else:
        given.set("pure_bf16", "precision", "bf16")
    given.off("bf16", "fp16", "tf32", why="pure_bf16 says it")


def _fp8(given: KeyReader, driver: str | None) -> bool:
    """Translates products of linear layers in fp8; all else is as under bf16. Returns whether it is possible."""
    can = given.switch("fp8") and driver != "deepspeed"
    if can:
        given.set("fp8", "precision", "fp8-mixed", "the first linear layer too; there it stays in 16 bits")
        torchao = given.word("fp8_backend", "auto") in ("auto", "torchao")
        why = "fp8-mixed is torchao's" if torchao else "torchao's scales, taken anew from each tensor"
        given.note("fp8_backend", "unneeded" if torchao else "changed", why)
        given.off("fp8_enable_fsdp_float8_all_gather", why="weights are gathered as they are kept: the same numbers")
    elif given.switch("fp8"):
        given.lose("fp8", "DeepSpeed has no fp8 here; take FSDP, or bf16")
    else:
        given.off("fp8")
    given.off(*(key for key in FP8 if not can))
    return can


def _recompute(given: KeyReader) -> None:
    """Translates recompute, which is on by default; Unsloth's variant keeps inputs in CPU memory."""
    if any(given.raw.get(key) is not None for key in ("gradient_checkpointing", "activation_checkpointing")):
        given.off("disable_gradient_checkpointing", why="gradient_checkpointing says it")
    elif given.has("disable_gradient_checkpointing"):
        given.set("disable_gradient_checkpointing", "recompute", not given.switch("disable_gradient_checkpointing"))
    else:
        given.off("disable_gradient_checkpointing")
        given.found.defaults["recompute"] = Default("disable_gradient_checkpointing", True)
    if given.switch("use_unsloth_gc") and not given.switch("disable_gradient_checkpointing"):
        given.set("use_unsloth_gc", "offload_activations", True)
    else:
        given.off("use_unsloth_gc")


def _unwritten(found: llama_language.Unwritten) -> dict[str, Handler]:
    """Notes the workload's keys where none is written."""
    handler = fated(found.fate, f"no workload is written: {found.why}")
    decides = fated(found.fate, found.why, found.alters)
    handlers = dict.fromkeys(OF_WORKLOAD, handler)
    return {**handlers, found.key: decides}


def _early_stopping(given: KeyReader) -> None:
    if given.has("early_stopping_steps"):
        patience = given.count("early_stopping_steps", 1)
        given.set("early_stopping_steps", "evaluation.early_stopping.patience", patience)


def _all(names: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(names.split(), handler)


def _later(what: str) -> Handler:
    return fated("later", what, alters=True)


def _of_others(engine: str) -> Handler:
    return if_on(lost(f"{engine} is no engine here, and its ranks share samples"))


_OPTIMIZER = if_on(lost("name an optimizer by its import path in optimizer.name"))
_OF_IT = fated("refused", "it is of an optimizer that is not here")
_ELSEWHERE = fated("unneeded", "it is for LLaMA-Factory's own chat and export")
_UNSLOTH = if_on(fated("refused", "Unsloth is not used here"))
_REPORTED = fated("unneeded", "drivetrain report draws the loss and the metrics of every run")
_RAY = fated("refused", "Ray is not used here; drivetrain launch writes jobs for Slurm and Kubernetes")

_SWANLAB = fated("unneeded", "add swanlab to tracking.trackers; SwanLab's own variables say the rest")
_PROFILER = fated("unneeded", "drivetrain profile shows where the time goes")
_MULTIMODAL = _later("no models of images and texts are trained here yet")
_KTRANSFORMERS = if_on(fated("refused", "KTransformers is not used here"))

KEYS: dict[str, Handler] = {
    # model
    **_all("shift_attn mixture_of_depths", if_on(lost("the model's own layers and attention are taken"))),
    "use_unsloth": _UNSLOTH,
    "use_reentrant_gc": fated("unneeded", "the non-reentrant way is taken, which does the same"),
    "print_param_status": fated("unneeded", "the run prints how many parameters it trains"),
    **_all("hf_hub_token ms_hub_token om_hub_token", fated("unneeded", "the hub's own login has it")),
    **_all("image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches", if_on(_MULTIMODAL)),
    **_all(
        "video_max_pixels video_min_pixels video_fps video_maxlen",
        if_on(_later("no models of video are trained here yet")),
    ),
    **_all("use_audio_in_video audio_sampling_rate", if_on(_later("no models of sound are trained here yet"))),
    **_all("freeze_vision_tower freeze_multi_modal_projector", _MULTIMODAL),
    **_all("freeze_language_model media_dir", if_on(_MULTIMODAL)),
    # data
    "overwrite_cache": fated("unneeded", "tokenised data are made again when what made them changed"),
    "data_shared_file_system": fated("unneeded", "every machine reads the data at the run file's path"),
    "disable_shuffling": if_on(fated("refused", "the order of data is random, a function of seed and step")),
    # method
    **_all("use_apollo use_badam use_adam_mini use_muon", _OPTIMIZER),
    **_all("apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type", _OF_IT),
    **_all("apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block", _OF_IT),
    **_all("badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose", _OF_IT),
    **_all("use_mca use_megatron_bridge megatron_bridge_args", _of_others("Megatron")),
    **_all("use_hyper_parallel hyper_parallel_args hyper_parallel_cp_size", _of_others("HyperParallel")),
    **_all("use_kt kt_cpu_activation kt_weight_path kt_non_expert_weight_path", _KTRANSFORMERS),
    # telling
    **_all("plot_loss compute_accuracy", _REPORTED),
    "include_effective_tokens_per_second": fated("unneeded", "the run's report has samples a second"),
    "use_swanlab": if_on(fated("refused", "write a tracker and give its import path in tracking.trackers")),
    **_all("swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key", _SWANLAB),
    **_all("swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret", _SWANLAB),
    "enable_torch_profiler": if_on(fated("refused", "no profiler is started; the report has time and memory")),
    **_all("profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps", _PROFILER),
    **_all("profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack", _PROFILER),
    "profile_modules": _PROFILER,
    **_all("ray_run_name ray_storage_path ray_storage_filesystem ray_num_workers resources_per_worker", _RAY),
    **_all("placement_strategy ray_init_kwargs", _RAY),
    **_all("master_addr master_port", fated("unneeded", "--rendezvous says it")),
    # what comes after training
    **_all("infer_backend infer_dtype offload_folder vllm_maxlen vllm_gpu_util vllm_enforce_eager", _ELSEWHERE),
    **_all("vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size", _ELSEWHERE),
    **_all("sglang_config sglang_lora_backend", _ELSEWHERE),
    "export_dir": fated("unneeded", f"after training: {EXPORT} --output FOLDER"),
    "export_size": fated("unneeded", f"after training: {EXPORT} --shard-size 5GB, or its number"),
    **_all("export_device export_legacy_format", fated("unneeded", "exports are safetensors, written from the CPU")),
    **_all("export_quantization_bit export_quantization_dataset", fated("refused", GPTQ)),
    **_all("export_quantization_nsamples export_quantization_maxlen", fated("refused", GPTQ)),
    "export_hub_model_id": fated("unneeded", f"after training: {EXPORT} --push OWNER/NAME"),
    **_all(
        "do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty",
        fated("unneeded", GENERATING),
    ),
    **_all("length_penalty skip_special_tokens eval_num_beams", fated("unneeded", GENERATING)),
}
TOGETHER = (
    *("pure_bf16", "disable_gradient_checkpointing", "use_unsloth_gc", "early_stopping_steps"),
    *("fp8", *FP8),
    *llama_adapter.TOGETHER,
    *llama_losses.KEYS,
    *llama_preferences.KEYS,
    *llama_reinforcement.KEYS,
    *llama_optimizer.TOGETHER,
    *(key for key in (*llama_model.KEYS, *llama_model.TOGETHER) if key not in llama_model.OF_TRAINING),
)
