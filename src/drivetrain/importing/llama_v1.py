"""Translates a LLaMA-Factory v1 YAML, whose keys and defaults are not those of version 0.

Keys: the argument classes and trainers of LLaMA-Factory's src/llamafactory/v1 (config/, core/, plugins/). The stage
(sft, dpo, rm) is a word of its command line: here the data show it, and the model's class.
"""

from __future__ import annotations

from drivetrain.config.translation import Handler, fated, if_on, lost
from drivetrain.importing import llama_v1_model
from drivetrain.importing.key_reader import KeyReader, in_turn
from drivetrain.importing.training_arguments import COPIED
from drivetrain.importing.training_rhythm import at_the_end
from drivetrain.importing.translated_file import Default, Source, TranslatedFile

SIZES = "it follows from the world size and cp_size"
BY_TOKENS = (
    "a batch there is as many samples as have micro_batch_size * cutoff_len tokens, here it is a number of samples"
)


def translate(source: Source, driver: str | None) -> TranslatedFile:
    """Translates the workload too, if its model and data are available here."""
    found = TranslatedFile(source)
    given = KeyReader(source.raw, found, source.prefix)
    groups = [_engine, lambda given: _precision(given, driver), _batch, _optimizer, _length, _rhythm, _running]
    in_turn(given, [*groups, llama_v1_model.workload])
    given.rest({**KEYS, **llama_v1_model.KEYS})
    return found


def engine_of(raw: dict[str, object]) -> str | None:
    """Returns the engine that dist_config names."""
    block = raw.get("dist_config")
    return ENGINES.get(str(block.get("name"))) if isinstance(block, dict) else None


ENGINES = {"fsdp2": "fsdp", "fsdpturbo": "fsdp", "deepspeed": "deepspeed"}


# --- engine and precision --------------------------------------------------------------------------------------------


def _engine(given: KeyReader) -> None:
    """Translates the engine. Without dist_config several ranks are replicas (DDP), which the launcher decides."""
    if not given.take("dist_config"):
        given.off("dist_config", why="ranks are replicas; engine and processes set it")
        return
    block = given.block("dist_config")
    name = block.word("name")
    if name not in ENGINES:
        block.lose("name", f"{name}: there are {', '.join(ENGINES)}")
    else:
        block.set("name", "engine.name", ENGINES[name])
    if block.has("reshard_after_forward"):
        block.set("reshard_after_forward", "engine.reshard", block.switch("reshard_after_forward", True))
    if block.has("offload_params"):
        block.set("offload_params", "engine.offload", block.switch("offload_params"))
    if given.count("mp_replicate_size", 1) > 1 and given.has("mp_shard_size"):
        given.set("mp_shard_size", "engine.hybrid", given.count("mp_shard_size", 1))
        given.off("mp_replicate_size", why="engine.hybrid says it")
    block.rest(DIST)


DIST: dict[str, Handler] = {
    "config_file": fated("mapped", "read"),
    "pin_memory": fated("unneeded", "memory is pinned where there is a GPU"),
    "dcp_path": if_on(fated("unneeded", "weights are read from workload.model.path")),
    **dict.fromkeys(
        ("ep_size", "ep_dispatcher", "ep_fsdp_size"),
        fated("refused", "experts are not dealt to ranks: each is sharded as other layers are"),
    ),
}


def _precision(given: KeyReader, driver: str | None) -> None:
    """Translates the precision. bf16 is read under fsdp2 alone: weights in fp32, copies of them in bf16."""
    on = given.switch("bf16", True)
    if driver in ("fsdp", "mesh", "deepspeed"):
        copied = COPIED.get(driver, {}).get("bf16", "bf16-mixed")
        is_json = driver == "deepspeed"  # whose JSON says it; auto is bf16 there
        given.set("bf16", "precision", copied if on or is_json else "fp32", is_soft=is_json)
    elif given.take("peft_config"):
        given.set("bf16", "precision", "bf16-mixed" if on else "fp32", "the base is in fp32, there as it was saved")
    else:
        given.found.defaults["precision"] = Default(f"{given.prefix}bf16", "fp32")
        given.off("bf16", why="without dist_config all is in fp32: precision=bf16-mixed is quicker")


# --- batch, optimizer, length ----------------------------------------------------------------------------------------


def _batch(given: KeyReader) -> None:
    micro, whole = given.count("micro_batch_size", 1), given.count("global_batch_size", 0)
    if given.has("global_batch_size"):
        given.set("global_batch_size", "batch_size", whole)
        given.set("micro_batch_size", "micro_batch_size", micro)
    else:
        given.set("micro_batch_size", "batch_size_per_device", micro)
    strategy = given.word("batching_strategy", "normal")
    if strategy in ("normal", "padding_free"):
        given.note("batching_strategy", "mapped", "workload.data.packing spares padding, with the same result")
    else:
        given.lose("batching_strategy", f"{strategy}: {BY_TOKENS}")


def _optimizer(given: KeyReader) -> None:
    """Translates the optimizer: torch's AdamW at its own weight decay, at a constant rate."""
    given.set("learning_rate", "optimizer.lr", given.number("learning_rate", 1e-4))
    block = given.block("optim_config") if given.take("optim_config") else None
    if block is None:
        given.off("optim_config", why="it is AdamW")
        given.found.defaults["optimizer.name"] = Default(f"{given.prefix}optim_config", "adamw")
        given.found.defaults["optimizer.weight_decay"] = Default(f"{given.prefix}optim_config", 0.01)
    else:
        name = block.word("name")
        block.lose("name", f"{name}: name an optimizer by its import path in optimizer.name")
        block.rest(dict.fromkeys(block.raw, fated("refused", f"it is of {name}")))
    if given.take("lr_scheduler_config"):
        block = given.block("lr_scheduler_config")
        block.rest(dict.fromkeys(block.raw, lost("a schedule of a plugin; give schedule.name")))
    else:
        given.off("lr_scheduler_config", why="the rate is constant")
        given.found.defaults["schedule.name"] = Default(f"{given.prefix}lr_scheduler_config", "constant")


def _length(given: KeyReader) -> None:
    steps, epochs = given.count("max_steps", 0), given.count("num_train_epochs", 3)
    if steps > 0:
        given.set("max_steps", "loop.steps", steps)
        given.off("num_train_epochs", why="max_steps says it")
    else:
        given.off("max_steps", why="num_train_epochs says it")
        given.set("num_train_epochs", "loop.epochs", epochs)
    given.set("max_grad_norm", "loop.max_grad_norm", given.number("max_grad_norm", 1.0))


# --- saving, telling, running ----------------------------------------------------------------------------------------


def _rhythm(given: KeyReader) -> None:
    """Translates cadences. It saves at the end alone by default."""
    if given.has("save_epochs"):
        often = given.number("save_epochs", 1.0)
        why = "a run saves at each evaluation, which is after each epoch, and at the end"
        given.note("save_epochs", "mapped" if often == 1 else "changed", why)
        given.off("save_steps", why="save_epochs says it")
    elif given.count("save_steps", 0) > 0:
        given.set("save_steps", "checkpoints.every_steps", given.count("save_steps", 0))
    else:
        at_the_end(given, "save_steps")
    if given.count("save_total_limit", 0) > 0:
        given.set("save_total_limit", "checkpoints.keep_last", given.count("save_total_limit", 0))
    else:
        given.note("save_total_limit", "changed", "checkpoints.keep_last sets how many are kept, at least 1")
    given.set("logging_steps", "tracking.log_every", given.count("logging_steps", 1))


def _running(given: KeyReader) -> None:
    if given.has("output_dir"):
        given.set("output_dir", "output", str(given.take("output_dir")))
    given.set("seed", "seed", given.count("seed", 42))
    if given.has("full_determinism"):
        given.set("full_determinism", "deterministic", given.switch("full_determinism"))
    given.set("enable_activation_checkpointing", "recompute", given.switch("enable_activation_checkpointing", True))
    if given.has("batching_workers"):
        given.set("batching_workers", "loader.workers", given.count("batching_workers", 16))


_CHAT = fated("unneeded", "it is for LLaMA-Factory's own chat")

KEYS: dict[str, Handler] = {
    **dict.fromkeys(("sample_backend", "max_new_tokens"), _CHAT),
    **dict.fromkeys(("dp_size", "mp_replicate_size", "mp_shard_size"), fated("unneeded", SIZES)),
    "cp_size": if_on(fated("unneeded", "each rank has sequences of its own")),
    "cp_mode": fated("unneeded", "attention trades parts of the sequence for heads, as Ulysses does"),
    "dist_timeout": fated("unneeded", "a rank that fails ends the others"),
    "resume_from_checkpoint": if_on(fated("refused", "--resume goes on from a checkpoint of this project only")),
    "save_ckpt_as_hf": fated("unneeded", "drivetrain export writes Transformers' form"),
}
# read together with others
TOGETHER = (
    *("dist_config", "bf16", "micro_batch_size", "global_batch_size", "batching_strategy", "learning_rate"),
    *("optim_config", "lr_scheduler_config", "max_steps", "num_train_epochs", "max_grad_norm", "save_epochs"),
    *("save_steps", "save_total_limit", "logging_steps", "output_dir", "seed", "full_determinism"),
    *("enable_activation_checkpointing", "batching_workers", *llama_v1_model.TOGETHER),
)
# that no other software has
OWN = (
    *("dist_config", "batching_strategy", "global_batch_size", "optim_config", "lr_scheduler_config", "save_epochs"),
    *("enable_activation_checkpointing", "batching_workers", "cp_size", "cp_mode", "mp_shard_size", "sample_backend"),
    *("mp_replicate_size", "dist_timeout", "save_ckpt_as_hf", *llama_v1_model.OWN),
)
