"""Translates TRL's GRPO: its GRPOConfig as JSON, or the YAML of `trl grpo --config`.

Keys, defaults and meaning: TRL 1.16, trl/trainer/grpo_config.py, trl/trainer/grpo_trainer.py and trl/scripts/grpo.py.
"""

from __future__ import annotations

from typing import Any, get_args

from drivetrain.config.reinforcement import LOSSES, Correction
from drivetrain.config.translation import Handler, fated, if_on, lost
from drivetrain.errors import counted, problem
from drivetrain.importing import training_arguments
from drivetrain.importing.key_reader import KeyReader, in_turn
from drivetrain.importing.training_keys import KEYS as TRAINING_KEYS
from drivetrain.importing.translated_file import Source, TranslatedFile
from drivetrain.importing.trl_common import KEYS as COMMON
from drivetrain.importing.trl_common import TOGETHER as OF_COMMON
from drivetrain.importing.trl_common import data, model, recompute, reference, usual
from drivetrain.importing.trl_server import OWN, server
from drivetrain.importing.trl_server import TOGETHER as OF_SERVER

FIELD = "workload.reinforcement"
NUMBERS = {  # name there → (name here, default there)
    "beta": ("beta", 0.0),
    "temperature": ("temperature", 1.0),
    "epsilon": ("clip", 0.2),
    "delta": ("delta", None),
}
COUNTS = {"num_generations": ("answers", 8), "max_completion_length": ("max_new_tokens", 512)}
COUNTS |= {"num_iterations": ("passes", 1)}
# defaults that differ from those of TrainingArguments; bf16 is on too, unless fp16 is
USUAL: dict[str, Any] = {"learning_rate": 1e-6, "gradient_checkpointing": True, "logging_steps": 10}
SHIPPED: dict[str, Any] = {
    "accuracy_reward": "math",
    "get_soft_overlong_punishment": {"use": "length", "options": {"most": 1280, "over": 256}},
    "think_format_reward": {
        "use": "regex",
        "name": "think_format",
        "options": {"pattern": r"\A<think>(?!.*<think>)(.*?)</think>.*\Z"},
    },
}
SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")
VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
CORRECTION = tuple(f"vllm_importance_sampling_{name}" for name in ["correction", "mode", "clip_max", "clip_min", "cap"])
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
TOGETHER = (
    *(*NUMBERS, *COUNTS, *SAPO, *VESPO, *BATCH, *OF_COMMON),
    *("loss_type", "epsilon_high", "importance_sampling_level", "scale_rewards", "mask_truncated_completions"),
    *("reward_funcs", "reward_weights", "reward_model_name_or_path", *OF_SERVER, *CORRECTION),
    *("use_bias_correction_kl", "multi_objective_aggregation", "top_p", "repetition_penalty", "top_entropy_quantile"),
)
VLLM = """model_impl enable_sleep_mode server_timeout group_port gpu_memory_utilization max_model_length
    tensor_parallel_size"""
_VLLM = fated("unneeded", OWN)
_SHOWN = fated("unneeded", "samples.jsonl has every answer")


_BONUS = if_on(lost("there is no bonus for entropy"))
KEYS: dict[str, Handler] = {
    **COMMON,
    **dict.fromkeys((f"vllm_{name}" for name in VLLM.split()), fated("unneeded", "it is of how vLLM is started")),
    "vllm_structured_outputs_regex": if_on(lost("answers are drawn from all tokens, as the loss has it")),
    **dict.fromkeys(("use_transformers_paged", "use_transformers_continuous_batching"), _VLLM),
    **dict.fromkeys(("transformers_continuous_batching_config", "cache_implementation"), _VLLM),
    **dict.fromkeys(("ds3_gather_for_generation", "max_tool_calling_iterations"), _VLLM),
    **dict.fromkeys(("log_completions", "log_multimodal", "log_unique_prompts", "num_completions_to_print"), _SHOWN),
    "log_completions_hub_repo": _SHOWN,
    **dict.fromkeys(("entropy_coef", "use_adaptive_entropy"), _BONUS),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        fated("unneeded", "it is of use_adaptive_entropy"),
    ),
    "off_policy_mask_threshold": if_on(lost("answers of an older model are not masked")),
    "generation_kwargs": if_on(lost("answers are drawn at the temperature, from all tokens")),
    "min_p": if_on(lost("answers are drawn from all tokens, as the loss has it")),
    "top_k": if_on(lost("answers are drawn from all tokens, as the loss has it")),
    "chat_template_kwargs": if_on(lost("the template gets messages and tools alone")),
    "cast_lm_head_to_fp32": fated("unneeded", "losses are computed in fp32"),
    "disable_dropout": if_on(lost("the model's own dropout is taken: set it to 0 in the model's config")),
    "num_generations_eval": fated("unneeded", "an evaluation answers each prompt once"),
}


def translate(source: Source, driver: str | None) -> TranslatedFile:
    found = TranslatedFile(source)
    given = KeyReader(source.raw, found, source.prefix, usual=usual(source, USUAL))
    others = [group for group in training_arguments.groups(driver) if group is not training_arguments.batch]
    in_turn(
        given,
        [_batch, *others, recompute, _policy, _shapes, _exact, server, _correction, _rewards, _reference, model, data],
    )
    given.rest({**TRAINING_KEYS, **KEYS})
    return found


def _batch(given: KeyReader) -> None:
    """Translates the batch, which counts answers there: `steps_per_generation` micro-batches of them are drawn at once,
    and an update takes `gradient_accumulation_steps`."""
    micro, steps = given.count("per_device_train_batch_size", 8, 1), given.count("gradient_accumulation_steps", 1, 1)
    drawn, each = given.count("steps_per_generation", steps, 1), given.count("num_generations", 8, 1)
    if given.has("generation_batch_size"):
        why = f"it depends on the number of devices: give steps_per_generation ({drawn} now)"
        if given.has("steps_per_generation"):  # in JSON that GRPOConfig wrote, which has computed one from the other
            given.off("generation_batch_size", why="steps_per_generation says it")
        else:
            given.lose("generation_batch_size", why)
    if micro * drawn % each or drawn % steps:
        why = f"{micro} answers x {drawn} steps are no whole number of groups of {each}, or of updates of {steps} steps"
        raise problem(f"{given.prefix}steps_per_generation", why, "give sizes that divide each other")
    given.set("per_device_train_batch_size", "micro_batch_size", micro)
    given.found.translation.settings["batch_size_per_device"] = micro * drawn // each
    given.found.translation.settings[f"{FIELD}.updates"] = drawn // steps
    given.note("gradient_accumulation_steps", "mapped", f"batch_size_per_device, in prompts: {micro * drawn // each}")
    given.note("steps_per_generation", "mapped", f"{FIELD}.updates: {drawn // steps}")


def _policy(given: KeyReader) -> None:
    given.found.translation.settings |= {"workload.type": "language_model", "workload.stage": "grpo"}
    loss = given.word("loss_type", "dapo")
    if loss not in LOSSES:
        given.lose("loss_type", f"{loss}: there are {', '.join(LOSSES)}")
        return
    given.set("loss_type", f"{FIELD}.loss", loss)
    for key, (name, count) in COUNTS.items():
        given.set(key, f"{FIELD}.{name}", given.count(key, count, 1))
    for key, (name, default) in NUMBERS.items():
        if key == "epsilon" and "clip" not in LOSSES[loss].takes:
            given.off(key, why=f"{loss} does not clip")
        elif default is not None or given.has(key):
            given.set(key, f"{FIELD}.{name}", given.number(key, default or 0.0))
    if given.has("epsilon_high") and "clip_high" in LOSSES[loss].takes:
        given.set("epsilon_high", f"{FIELD}.clip_high", given.number("epsilon_high", 0.2))
    else:
        given.off("epsilon_high", why="it is not given, or the loss has none")


def _shapes(given: KeyReader) -> None:
    settings, loss = given.found.translation.settings, given.word("loss_type", "dapo")
    for name, keys, field, defaults in (
        ("sapo", SAPO, "temperatures", (1.0, 1.05)),
        ("vespo", VESPO, "shapes", (2.0, 3.0, 3.0, 2.0)),
    ):
        values = [given.number(key, default) for key, default in zip(keys, defaults, strict=True)]
        if loss == name:
            settings[f"{FIELD}.{field}"] = values
        for key in keys:
            given.note(key, "mapped" if loss == name else "unneeded", f"{FIELD}.{field} of loss: {name}")


def _exact(given: KeyReader) -> None:
    """Translates settings that only some values of change what is computed."""
    level = given.word("importance_sampling_level", "token")
    if level in LOSSES.get(given.word("loss_type", "dapo"), LOSSES["dapo"]).importance:
        given.set("importance_sampling_level", f"{FIELD}.importance", level)
    else:
        given.lose("importance_sampling_level", f"{level} is none of this loss")
    scale = given.word("scale_rewards", "group")
    scale = {"true": "group", "false": "none"}.get(scale, scale)
    given.set("scale_rewards", f"{FIELD}.scale", scale)
    if given.number("beta", 0.0):
        given.set("use_bias_correction_kl", f"{FIELD}.kl_ratio", given.switch("use_bias_correction_kl", True))
    else:
        given.off("use_bias_correction_kl", why="there is no divergence")
    given.set("mask_truncated_completions", f"{FIELD}.mask_truncated", given.switch("mask_truncated_completions"))
    for key, default in (("top_p", 1.0), ("repetition_penalty", 1.0), ("top_entropy_quantile", 1.0)):
        if given.number(key, default) == default:
            given.off(key)
        else:
            given.lose(key, "all tokens are drawn from, and learned from")
    if given.word("multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize":
        given.off("multi_objective_aggregation", why="rewards are added up, then compared")
    else:
        given.lose("multi_objective_aggregation", "rewards are added up before they are compared")


def _correction(given: KeyReader) -> None:
    """Translates how tokens are weighed where the generator's probabilities differ, which is done there if it is vLLM.

    Given without a cap, that is 3, and masks whole answers. null takes no cap.
    """
    switched, mode, highest, lowest, deprecated = CORRECTION
    if not (given.switch("use_vllm") and given.switch(switched, True)):
        given.off(*CORRECTION, why="the generator's probabilities are not made up for")
        return
    if given.word("loss_type", "dapo") == "vespo":
        for key in CORRECTION:
            given.lose(key, "vespo's weight of a whole answer has no correction here")
        return
    cap = deprecated if given.has(deprecated) else highest
    if given.raw.get(highest, 0.0) is not None or cap == deprecated:
        given.set(cap, f"{FIELD}.importance_cap", given.number(cap, 3.0))
    if given.has(lowest):
        given.set(lowest, f"{FIELD}.importance_floor", given.number(lowest, 0.0))
    known, how = get_args(Correction), given.word(mode, "sequence_mask")
    if how not in known:
        given.lose(mode, f"{how}: there are {', '.join(known)}")
    elif given.raw.get(highest, 0.0) is None and not given.has(lowest) and cap == highest:
        given.lose(mode, "tokens are weighed within bounds: give vllm_importance_sampling_clip_max")
    else:
        given.set(mode, f"{FIELD}.importance_correction", how)
    given.note(switched, "mapped", f"{FIELD}.importance_cap")
    given.off(highest if cap == deprecated else deprecated, why=f"{cap} is taken")


def _rewards(given: KeyReader) -> None:
    names, model = given.take("reward_funcs", []), given.take("reward_model_name_or_path")
    found: list[Any] = [] if model is None else [{"model": str(model)}]
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or (name not in SHIPPED and "." not in name):
            fix = f"give one of {', '.join(SHIPPED)}, or package.module.name"
            raise problem(f"{given.prefix}reward_funcs", f"{name} is not known", fix)
        found.append(SHIPPED.get(name) or {"use": ":".join(name.rsplit(".", 1))})
    weights = given.weights("reward_weights", len(found), counted(len(found), "reward"))
    if weights:
        blocks = [{"use": each} if isinstance(each, str) else each for each in found]
        found = [{**each, "weight": weight} for each, weight in zip(blocks, weights, strict=True)]
    given.note("reward_weights", "mapped", f"{FIELD}.rewards: weight")
    for key in ("reward_funcs", "reward_model_name_or_path"):
        given.note(key, "mapped", f"{FIELD}.rewards")
    if found:
        given.found.translation.settings[f"{FIELD}.rewards"] = found


def _reference(given: KeyReader) -> None:
    reference(given, FIELD)
