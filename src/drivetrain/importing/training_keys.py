"""Translates keys of TrainingArguments that are independent of others, those without meaning here, and the
optimizers."""

from __future__ import annotations

from typing import Any

from drivetrain.config import accelerate
from drivetrain.config.translation import Handler, Translation, fated, field_of, if_on, lost
from drivetrain.importing.key_reader import switch

UNPAGED = "the optimizer's state stays on the device: it is not moved to CPU memory when that is full"

# optim → optimizer.name, and what the Trainer passes on to the class
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("adamw", {})),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), ("adamw", {})),
    "adamw_torch_8bit": ("adamw8bit", {}),
    "adamw_torch_4bit": ("adamw4bit", {}),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), ("bnb-adamw8bit", {})),
    "paged_adamw_8bit": ("bnb-paged-adamw8bit", {}),
    "sgd": ("sgd", {}),
    # not torch's, whose rate is a share of the weights' size and falls with the step
    "adafactor": ("transformers.optimization:Adafactor", {"scale_parameter": False, "relative_step": False}),
    "adagrad": ("torch.optim:Adagrad", {}),
    "rmsprop": ("torch.optim:RMSprop", {}),
}
ADAM = {"adamw", "adamw8bit", "adamw4bit", "bnb-adamw8bit", "bnb-paged-adamw8bit"}  # the others have no betas


def _switched(to: str) -> Handler:
    return lambda key, value, into: into.set(key, to, switch(key, value))


def _compile_backend(key: str, value: Any, into: Translation) -> None:
    if value in (None, "inductor"):
        into.note(key, "unneeded", "compile=true compiles with inductor")
    else:
        into.note(key, "refused", f"compile=true compiles with inductor, not {value}")


def _one_of(allowed: tuple[Any, ...], why: str, otherwise: str, alters: bool = False) -> Handler:
    """Returns a handler of a key that needs no counterpart if it has one of these values, and is refused otherwise."""

    def handle(key: str, value: Any, into: Translation) -> None:
        if value in allowed:
            into.note(key, "unneeded", why)
        else:
            into.note(key, "refused", otherwise, alters)

    return handle


def _dealing(key: str, value: Any, into: Translation) -> None:
    """Translates accelerator_config: how samples are divided among ranks."""
    for name, given in (value or {}).items():
        if name == "split_batches" and given:
            into.note(f"{key}.{name}", "refused", SPLIT, alters=True)
        else:
            into.note(f"{key}.{name}", "unneeded", "each sample is dealt to one rank, in an order fixed by the seed")
    if not value:
        into.note(key, "unneeded", "it is off")


def _sampling(key: str, value: Any, into: Translation) -> None:
    if value in ("random", None):
        into.note(key, "unneeded", "the order is random, a function of seed and step")
    else:
        into.note(key, "refused", ORDER)


ORDER = "the order of data is random, a function of seed and step; workload.data.group_by_length spares padding"
SPLIT = "per_device_train_batch_size would be the batch of all devices: give that as batch_size"
HALVED = "a micro-batch that does not fit comes in halves, and the batch of a step stays"
_COMMAND = fated("unneeded", "it is a verb of the command line: train, evaluate, predict")
_LAUNCHER = fated("unneeded", "the launcher sets it")
_SCREEN = fated("unneeded", "--quiet sets what is on the screen")
_COUNTED = fated("unneeded", "the run's report has the number of samples and samples a second")
_METRICS = fated("unneeded", "metrics are counted over all samples, batch by batch")
_PUSHED = if_on(fated("refused", "nothing is sent to the hub"))
_HUB = fated("unneeded", "nothing is sent to the hub")
_SAVED = fated("unneeded", "a checkpoint is safetensors and all that resuming needs, written once")
_PINNED = fated("unneeded", "memory is pinned for a GPU, and workers stay for the whole run")
_GENERATED = if_on(
    fated("refused", "give workload.generate for answers, and evaluation.generation for BLEU, chrF, ROUGE")
)
FUSED = "fused_loss never holds the logits, which is what saves most"
_TPU = if_on(fated("refused", "there are no TPUs here"))
_OF_THE_WORKLOAD = fated("unneeded", "workload sets it: take one with --onto")

KEYS: dict[str, Handler] = {
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _COMMAND),
    "overwrite_output_dir": fated("unneeded", "--overwrite says it"),
    "resume_from_checkpoint": if_on(fated("refused", "--resume goes on from a checkpoint of this project only")),
    "ignore_data_skip": if_on(fated("refused", "a resumed run goes on where it was in the data")),
    "restore_callback_states_from_checkpoint": fated("unneeded", "a resumed run knows its early stopping"),
    "enable_jit_checkpoint": fated("unneeded", "a run saves when it is asked to end"),
    # batch and data
    "auto_find_batch_size": fated("unneeded", HALVED),
    "dataloader_num_workers": field_of("loader.workers"),
    "dataloader_prefetch_factor": if_on(field_of("loader.prefetch")),
    **dict.fromkeys(("dataloader_pin_memory", "dataloader_persistent_workers"), _PINNED),
    "dataloader_multiprocessing_context": fated("unneeded", "workers are started as PyTorch starts them"),
    "dataloader_in_order": fated("unneeded", "the order of the data is fixed"),
    "dataloader_drop_last": if_on(fated("refused", "the last batch of an epoch is kept: every sample counts once")),
    "remove_unused_columns": fated("unneeded", "workload.data names the columns"),
    "label_names": if_on(fated("refused", "workload.data.label_column names the label")),
    "group_by_length": if_on(fated("refused", ORDER)),
    "train_sampling_strategy": _sampling,
    "length_column_name": fated("unneeded", "lengths are known"),
    "accelerator_config": _dealing,
    "dispatch_batches": if_on(fated("unneeded", "each rank reads its own samples")),
    "split_batches": if_on(lost(SPLIT)),
    # the loss
    "average_tokens_across_devices": fated("unneeded", "losses are divided by the targets of the whole global batch"),
    "label_smoothing_factor": if_on(lost("the loss is the workload's; a workload of your own has its own")),
    "neftune_noise_alpha": if_on(lost("give it as workload.model.neftune_alpha")),
    "past_index": _one_of((-1, None), "it is off", "a model's past is not carried on", alters=True),
    "optim_args": if_on(lost("give them as optimizer.options")),
    "optim_target_modules": if_on(lost("one optimizer has all parameters")),
    # memory and speed
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), _switched("recompute")),
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        fated("unneeded", "the non-reentrant way is taken, which does the same"),
    ),
    "activation_offloading": _switched("offload_activations"),  # TRL's
    **dict.fromkeys(("torch_compile", "torchdynamo"), _switched("compile")),
    "torch_compile_backend": _compile_backend,
    "torch_compile_mode": _one_of((None, "default"), "it is the default", "compile=true takes the default mode"),
    "use_liger_kernel": if_on(fated("unneeded", FUSED)),
    "liger_kernel_config": if_on(fated("unneeded", FUSED)),
    "use_cache": fated("unneeded", "nothing is cached in training"),
    "torch_empty_cache_steps": fated("unneeded", "it frees no memory that a step needs"),
    "skip_memory_metrics": fated("unneeded", "the report has the peak memory"),
    "full_determinism": _switched("deterministic"),
    **dict.fromkeys(("fp16_backend", "half_precision_backend", "fp16_opt_level"), fated("unneeded", "AMP is torch's")),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"), if_on(fated("refused", "precision decides how it evaluates"))
    ),
    # several devices
    **dict.fromkeys(("local_rank", "_n_gpu", "ddp_backend", "ray_scope", "log_on_each_node"), _LAUNCHER),
    "ddp_timeout": fated("unneeded", "a rank that fails ends the others"),
    "ddp_broadcast_buffers": fated("unneeded", "evaluation, prediction and checkpoints use the first rank's buffers"),
    "mp_parameters": if_on(lost("SageMaker's model parallelism, whose ranks would each get a batch of their own")),
    "parallelism_config": if_on(accelerate.KEYS["parallelism_config"]),
    "sharded_ddp": if_on(fated("refused", "FairScale is gone; take engine=fsdp")),
    "use_mps_device": if_on(fated("refused", "there is no MPS here")),
    "use_ipex": if_on(fated("unneeded", "PyTorch has taken it in")),
    "jit_mode_eval": if_on(fated("refused", "compile=true compiles the model")),
    **dict.fromkeys(("tpu_num_cores", "tpu_metrics_debug"), _TPU),
    # evaluation
    "eval_accumulation_steps": _METRICS,
    "eval_do_concat_batches": _METRICS,
    "eval_use_gather_object": _METRICS,
    "batch_eval_metrics": _METRICS,
    "prediction_loss_only": _METRICS,
    "include_for_metrics": _METRICS,
    "include_inputs_for_metrics": _METRICS,
    "use_legacy_prediction_loop": _METRICS,
    "eval_delay": if_on(fated("refused", "evaluations start with the first that is due")),
    "eval_on_start": if_on(fated("refused", "the first evaluation comes after the first epoch, or every_steps")),
    "greater_is_better": fated("unneeded", "the metric decides it"),
    **dict.fromkeys(("predict_with_generate", "generation_max_length", "generation_num_beams"), _GENERATED),
    "generation_config": _GENERATED,
    "sortish_sampler": if_on(fated("refused", ORDER)),
    # saving and telling
    **dict.fromkeys(("save_safetensors", "save_on_each_node"), _SAVED),
    "save_only_model": if_on(fated("refused", "a checkpoint holds all that resuming needs")),
    "logging_dir": fated("unneeded", "TensorBoard's files lie in the run's folder"),
    "logging_first_step": if_on(fated("refused", "the curve has a point each tracking.log_every steps")),
    "logging_nan_inf_filter": fated("unneeded", "a loss that is no number ends the run, with the step"),
    **dict.fromkeys(("log_level", "log_level_replica", "disable_tqdm"), _SCREEN),
    **dict.fromkeys(("include_num_input_tokens_seen", "include_tokens_per_second"), _COUNTED),
    "debug": fated("unneeded", "a loss or norm that is no number ends the run, with the step"),
    "push_to_hub": _PUSHED,
    **dict.fromkeys(("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"), _HUB),
    **dict.fromkeys(("hub_token", "push_to_hub_token", "push_to_hub_model_id", "push_to_hub_organization"), _HUB),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _HUB),
    # what people's scripts add: the model and the data
    **dict.fromkeys(("model_name_or_path", "config_name", "tokenizer_name", "cache_dir"), _OF_THE_WORKLOAD),
    **dict.fromkeys(("train_file", "validation_file", "test_file", "dataset_name", "task_name"), _OF_THE_WORKLOAD),
    **dict.fromkeys(("dataset_config_name", "max_seq_length", "pad_to_max_length"), _OF_THE_WORKLOAD),
    **dict.fromkeys(("max_train_samples", "max_eval_samples", "max_predict_samples"), _OF_THE_WORKLOAD),
}
# read together with others, in training_arguments, training_rhythm and training_spread
TOGETHER = (
    *("bf16", "fp16", "tf32", "per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "weight_decay", "optim", "adafactor", "adam_beta1", "adam_beta2", "adam_epsilon", "seed"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "use_cpu", "no_cuda", "data_seed"),
    *("max_steps", "num_train_epochs", "max_grad_norm", "eval_strategy", "evaluation_strategy", "eval_steps"),
    *("per_device_eval_batch_size", "metric_for_best_model", "save_strategy", "save_steps", "save_total_limit"),
    *("load_best_model_at_end", "logging_strategy", "logging_steps", "report_to", "output_dir", "run_name"),
    *("deepspeed", "fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph"),
)
