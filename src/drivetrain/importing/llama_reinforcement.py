"""Translates LLaMA-Factory's keys of reinforcement learning (stage: ppo).

Sources of their meaning: RLHFArguments and GeneratingArguments of LLaMA-Factory 0.9 (hparams/finetuning_args.py,
hparams/generating_args.py), its train/ppo/trainer.py, and the PPOConfig of TRL 0.9, whose trainer that one is.
"""

from __future__ import annotations

from drivetrain.config.reinforcement import PPO
from drivetrain.errors import problem
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.llama_preferences import NOT_ITS, reference

FIELD = "workload.reinforcement"
OF_REWARD = ("reward_model", "reward_model_type", "reward_model_adapters", "reward_model_quantization_bit")
OF_PPO = ("ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards")
KEYS = (*OF_REWARD, *OF_PPO)
BETA = 0.2  # init_kl_coef of TRL's PPOConfig
EPOCHS, NEW_TOKENS, TEMPERATURE = 4, 1024, 0.95


def reinforcement(given: KeyReader) -> None:
    stage = given.word("stage", "sft")
    if stage != PPO:
        given.off(*KEYS, why=NOT_ITS)
        return
    _reward(given)
    given.set("ppo_epochs", f"{FIELD}.passes", given.count("ppo_epochs", EPOCHS))
    given.found.translation.settings[f"{FIELD}.beta"] = BETA
    given.note("ppo_target", "changed", f"beta stays at {BETA}, with which it begins there")
    if given.count("ppo_buffer_size", 1) == 1:
        given.off("ppo_buffer_size", why="a batch of answers is that of one step")
    else:
        given.lose("ppo_buffer_size", f"multiply the batch by it, and give it as {FIELD}.updates")
    for key, what in (("ppo_score_norm", "rewards are"), ("ppo_whiten_rewards", "advantages are whitened, rewards")):
        if given.switch(key):
            given.lose(key, f"{what} not normalised")
        else:
            given.off(key)
    given.set("max_new_tokens", f"{FIELD}.max_new_tokens", given.count("max_new_tokens", NEW_TOKENS))
    given.set("temperature", f"{FIELD}.temperature", given.number("temperature", TEMPERATURE))
    for key in ("top_p", "top_k"):
        given.note(key, "changed", "answers are drawn from all tokens, as the loss has it")
    reference(given, FIELD)


def _reward(given: KeyReader) -> None:
    path = given.take("reward_model")
    if path is None:
        raise problem(f"{given.prefix}reward_model", "stage ppo needs one, and none is given", "give its folder")
    if given.word("reward_model_type", "lora") == "full":
        given.off("reward_model_type", why="the weights are full")
        why = "a sequence classifier with one label, as stage: rm makes here, not a value head"
        given.set("reward_model", f"{FIELD}.rewards", [{"model": str(path)}], why)
    else:
        given.off("reward_model_type", why="it is noted elsewhere")
        why = "a folder of full weights is read: export it merged, and give reward_model_type: full"
        given.lose("reward_model", why)
    for key in ("reward_model_adapters", "reward_model_quantization_bit"):
        if given.has(key):
            given.lose(key, "the reward model is its folder's, in the run's precision")
