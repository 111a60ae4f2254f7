"""LLaMA-Factory's keys in a file that trains nothing: what becomes of each when a model answers or is exported.

Keys: the argument classes of LLaMA-Factory 0.9, https://llamafactory.readthedocs.io
"""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.config.translation import Handler, fated, if_on
from drivetrain.importing.llama_model import NEWEST, OWN_TEMPLATE, TOKENIZERS, only

QUANTISED_BASE = (
    "the weights are taken in the bits that they have: those of a run with quantised_base, or of drivetrain export "
    "--quantise"
)
AS_IT_LIES = "the tokenizer beside the model is taken as it lies: save it there with its tokens"
NO_DATA = "weights are rounded without data"
OF_RUN = "the run's own is taken"


def _all(names: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(names.split(), handler)


KEYS: dict[str, Handler] = {
    # model
    "quantization_bit": if_on(fated("refused", QUANTISED_BASE)),
    **_all("quantization_method quantization_type", fated("unneeded", "quantization_bit decides it")),
    **_all("double_quantization quantization_device_map", fated("unneeded", "quantization_bit decides it")),
    "rope_scaling": if_on(fated("refused", "the model's config.json has it, or the run's workload.model.rope_scaling")),
    **_all("resize_vocab add_tokens add_special_tokens new_special_tokens", if_on(fated("refused", AS_IT_LIES))),
    "new_special_tokens_config": if_on(fated("refused", AS_IT_LIES)),
    "split_special_tokens": if_on(fated("refused", "special tokens are never taken apart")),
    "use_fast_tokenizer": only(True, TOKENIZERS, TOKENIZERS, "changed"),
    "model_revision": only("main", "it is the newest", NEWEST),
    "cache_dir": fated("changed", "HF_HOME sets where the hub's files are kept"),
    **_all("hf_hub_token ms_hub_token om_hub_token", fated("unneeded", "the hub's own login has it")),
    **_all("flash_attn use_unsloth enable_liger_kernel", fated("unneeded", "kernels give the same numbers")),
    "use_kv_cache": only(True, "keys and values are kept", "keys and values are kept: the same answers", "unneeded"),
    **_all("offload_folder low_cpu_mem_usage", fated("unneeded", "weights are loaded onto the device at once")),
    **_all("vllm_maxlen vllm_gpu_util vllm_enforce_eager", fated("unneeded", "give it to vLLM itself")),
    **_all("vllm_max_lora_rank vllm_config", fated("unneeded", "give it to vLLM itself")),
    **_all("sglang_maxlen sglang_mem_fraction sglang_tp_size", fated("unneeded", "give it to SGLang itself")),
    **_all("sglang_config sglang_lora_backend", fated("unneeded", "give it to SGLang itself")),
    # export
    "export_device": fated("unneeded", "weights are written from the CPU"),
    "export_legacy_format": if_on(fated("refused", "exports are safetensors, which every Transformers reads")),
    **_all("export_quantization_dataset export_quantization_nsamples", fated("unneeded", NO_DATA)),
    "export_quantization_maxlen": fated("unneeded", NO_DATA),
    "export_hub_model_id": fated("changed", "in the command; the repository is private, --public makes it visible"),
    # answers
    "tool_format": fated("unneeded", OWN_TEMPLATE),
    "enable_thinking": only(True, OWN_TEMPLATE, f"{OWN_TEMPLATE}, and its own default is taken"),
    **_all("preserve_thinking reasoning_effort", fated("refused", f"{OWN_TEMPLATE}, and its own default is taken")),
    "skip_special_tokens": only(True, "answers are printed without them", "answers are printed without them"),
    "eval_num_beams": only(1, "one answer a prompt", "one answer a prompt, whose tokens are drawn or the likeliest"),
    # questions of multiple choice
    "task": fated("changed", "in the command; unpack the archive in its folder, which has test, val and dev then"),
    **_all("task_dir n_shot", fated("mapped", "in the command")),
    "lang": fated("unneeded", "the prompts are in the language of the questions"),
    "save_dir": fated("changed", "--json prints all figures"),
    **_all("batch_size download_mode", fated("unneeded", "batches are cut by length, and nothing is downloaded")),
    # predict
    "max_samples": fated("refused", "predict answers all samples of a file: give a shorter one"),
    "tokenized_path": fated("unneeded", "prompts are tokenised when they are answered"),
    "media_dir": fated("later", "models of images and texts"),
    "per_device_eval_batch_size": fated("unneeded", "batches are cut by length"),
    "overwrite_output_dir": fated("unneeded", "what a kill left of the answers is continued"),
    "seed": fated("changed", OF_RUN),
    **_all("bf16 fp16 pure_bf16 bf16_full_eval fp16_full_eval", if_on(fated("changed", f"precision: {OF_RUN}"))),
    **_all("deepspeed fsdp fsdp_config", if_on(fated("changed", f"engine: {OF_RUN}, or one behind the command"))),
    **_all("stage finetuning_type", fated("unneeded", "the run says it, or the adapter")),
}


def handlers(known: Iterable[str]) -> dict[str, Handler]:
    """Returns what becomes of each key. known: LLaMA-Factory's, of which those not named here are for training."""
    return {**dict.fromkeys(known, fated("unneeded", "it decides nothing where nothing is trained")), **KEYS}
