"""Translates deepspeed, fsdp and the options of DDP from TrainingArguments."""

from __future__ import annotations

from typing import Any

from drivetrain.config import accelerate
from drivetrain.config.translation import Handler, Translation, fated, field_of, if_on, translated
from drivetrain.errors import problem
from drivetrain.importing.key_reader import OF_JUNK, KeyReader, switch
from drivetrain.importing.translated_file import shown

# the old way of writing fsdp: words in one text
STRATEGIES = {"full_shard": True, "hybrid_shard": True, "shard_grad_op": False, "hybrid_shard_zero2": False}

HYBRID = "give engine.hybrid, the ranks of a machine, which it takes from the launcher"


def is_sharded(raw: Any) -> bool:
    """Returns whether the keys select FSDP."""
    given = raw.get("fsdp")
    return given not in (None, False, "", [], "false", "False", "no")


def spread(given: KeyReader) -> None:
    into = given.found.translation
    if given.take("deepspeed"):
        into.set(f"{given.prefix}deepspeed", "engine.name", "deepspeed")
    else:
        given.off("deepspeed")
    if is_sharded(given.raw):
        _fsdp(given)
    else:
        given.off("fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
    _ddp(given, alone=not given.take("deepspeed") and not is_sharded(given.raw))


# --- FSDP ------------------------------------------------------------------------------------------------------------


def _fsdp(given: KeyReader) -> None:
    words = _words(given)
    into = given.found.translation
    hybrid = any(word.startswith("hybrid") for word in words)
    into.set(f"{given.prefix}fsdp", "engine.name", "fsdp", HYBRID if hybrid else "")
    for word in words:
        if word in STRATEGIES:
            into.settings["engine.reshard"] = STRATEGIES[word]
        elif word == "offload":
            into.settings["engine.offload"] = True
        elif word == "no_shard":
            raise problem(f"{given.prefix}fsdp", "no_shard shards nothing", "take fsdp out: engine=ddp does the same")
        elif word not in ("auto_wrap", "true"):
            raise problem(f"{given.prefix}fsdp", f"{shown(word)} was given", f"there are {', '.join(STRATEGIES)}")
    if words != ["true"]:
        into.settings["engine.wrap"] = "block" if "auto_wrap" in words else []
    _options(given)


def _words(given: KeyReader) -> list[str]:
    value = given.take("fsdp")
    if isinstance(value, bool):
        return ["true"]
    if isinstance(value, str):
        return value.lower().replace(",", " ").split()
    if isinstance(value, list):
        return [str(word).lower() for word in value]
    raise problem(
        f"{given.prefix}fsdp", f"{shown(value)} was given", "give true, or words such as full_shard auto_wrap"
    )


def _options(given: KeyReader) -> None:
    """Reads fsdp_config, whose keys may have the prefix fsdp_ or not; and two of them in the old place."""
    old = ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
    block = given.take("fsdp_config", {})
    if not isinstance(block, dict):
        why = f"{shown(block)} was given: a path is not followed here"
        raise problem(f"{given.prefix}fsdp_config", why, "put the file's content in its place")
    for name, value in block.items():
        _option(f"{given.prefix}fsdp_config.{name}", name.removeprefix("fsdp_"), value, given.found.translation)
    for name in old:
        if given.take(name):
            _option(f"{given.prefix}{name}", name.removeprefix("fsdp_"), given.take(name), given.found.translation)
        else:
            given.off(name)


def _option(key: str, name: str, value: Any, into: Translation) -> None:
    handlers = {option.removeprefix("fsdp_"): handler for option, handler in accelerate.FSDP.items()} | OPTIONS
    if name not in handlers:
        translated({key: value}, {}, into)
        return
    try:
        handlers[name](key, value, into)
    except OF_JUNK:
        raise problem(key, f"{shown(value)} was given, which is no value for it", "correct it") from None


def _smallest(key: str, value: Any, into: Translation) -> None:
    into.set(key, "engine.wrap_min_parameters", value)
    into.settings["engine.wrap"] = "size"


def _offload(key: str, value: Any, into: Translation) -> None:
    into.set(key, "engine.offload", switch(key, value))


_XLA = if_on(fated("refused", "there are no TPUs here"))
OPTIONS: dict[str, Handler] = {
    "version": fated("mapped", "FSDP2, which does what FSDP1 did"),
    "min_num_params": if_on(_smallest),
    "cpu_offload": _offload,
    "activation_checkpointing": field_of("recompute"),
    "limit_all_gathers": fated("unneeded", "FSDP2 does it by itself"),
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"), _XLA),
}


# --- DDP -------------------------------------------------------------------------------------------------------------

DDP = {
    "ddp_find_unused_parameters": "find_unused",
    "ddp_bucket_cap_mb": "bucket_mb",
    "ddp_static_graph": "static_graph",
}


def _ddp(given: KeyReader, alone: bool) -> None:
    """Translates options of DDP. alone: the file names no other engine. An option that is off does not choose the
    engine."""
    for key, option in DDP.items():
        value = given.take(key)
        if value in (None, False, "false", "False"):
            given.off(key)
        elif alone:
            given.set(key, f"engine.{option}", value)
            given.found.translation.settings["engine.name"] = "ddp"
            given.found.soft.add("engine.name")  # another file may name another engine
        else:
            given.off(key, why="the engine is not ddp")
