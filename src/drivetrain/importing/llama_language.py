"""Translates LLaMA-Factory's keys of model and data to a language_model workload that trains the same, or states why it
cannot.

Sources of their meaning: the argument classes and data processors of LLaMA-Factory 0.9 (hparams/, data/processor/,
data/loader.py, model/model_utils/rope.py). A list of names is a text with commas, or a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from drivetrain.config import language_stages
from drivetrain.config.preference import REWARD
from drivetrain.config.translation import Fate
from drivetrain.errors import problem
from drivetrain.importing import llama_adapter, llama_losses, llama_preferences, llama_reinforcement, llama_weights
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.llama_model import published_config
from drivetrain.importing.llama_weights import CUTOFF, cutoff, names_of

STAGES = {stage.llama_factory: stage for stage in language_stages.STAGES.values() if stage.llama_factory is not None}
METHODS = ("full", "freeze", "lora", "oft")
DATA = "workload.data"
BUFFER = 16_384


class Unwritten(NamedTuple):
    """A key because of which there is no workload."""

    key: str
    fate: Fate
    why: str
    alters: bool = False  # the key says what is trained, and nothing here does


def unwritten(given: KeyReader) -> Unwritten | None:
    """Returns why nothing here trains the same as this file does; None if a workload can be written."""
    stage, method = given.word("stage", "sft"), given.word("finetuning_type", "lora")
    if stage not in STAGES:
        why = (
            f"{stage}: there are {', '.join(STAGES)}; with --without stage no workload is written, and what is trained "
            "is that of --onto RUN.YAML"
        )
        return Unwritten("stage", "refused", why, alters=True)
    if method not in METHODS:
        why = f"{method}: there are {', '.join(METHODS)}"
        return Unwritten("finetuning_type", "refused", why, alters=True)
    lacking = llama_adapter.lacking(given)
    if lacking is not None:
        return Unwritten(lacking[0], "refused", lacking[1], alters=True)
    if given.switch("use_llama_pro"):
        why = "that model has its added blocks already (LLaMA Pro): give the one before, and workload.model.add_blocks"
        return Unwritten("use_llama_pro", "refused", why, alters=True)
    if method == "freeze" and given.count("freeze_trainable_layers", 2) <= 0:
        why = "the last blocks can be trained alone, not the first"
        return Unwritten("freeze_trainable_layers", "refused", why, alters=True)
    return _without_data(given)


def _without_data(given: KeyReader) -> Unwritten | None:
    directory, path = str(given.take("dataset_dir", "")), str(given.take("model_name_or_path", ""))
    if directory.startswith("REMOTE:"):
        return Unwritten("dataset_dir", "refused", f"a registry on the hub: download {directory[7:]}, give its folder")
    for key in ("model_name_or_path", "dataset"):
        if not given.take(key):
            return Unwritten(key, "refused", f"{key} is not given")
    if given.switch("train_from_scratch") and published_config(path) is None:
        why = f"its config.json says what is made, and {path} is no folder here"
        return Unwritten("train_from_scratch", "refused", why)
    return None


def groups() -> list[Callable[[KeyReader], None]]:
    """Reads groups of keys of which one decides what another means."""
    of_data = [
        llama_losses.losses,
        llama_preferences.preferences,
        llama_reinforcement.reinforcement,
        _template,
        _sources,
        _evaluation,
        _length,
        _packing,
        _streaming,
        _train_on,
    ]
    return [_stage, *llama_weights.GROUPS, llama_adapter.adapters, llama_adapter.quantised, *of_data]


def _stage(given: KeyReader) -> None:
    given.found.translation.settings["workload.type"] = "language_model"
    stage = STAGES[given.word("stage", "sft")]
    name = llama_preferences.stage_of(given, stage.name)
    why = "the score is Transformers' sequence classifier's, not a value head's" if name == REWARD else ""
    given.set("stage", "workload.stage", name, why)


def _is_text(given: KeyReader) -> bool:
    return not STAGES[given.word("stage", "sft")].has_conversations


def _packs(given: KeyReader) -> bool:
    """Returns whether samples are packed: pre-training packs by default."""
    return given.switch("packing", _is_text(given)) or given.switch("neat_packing")


# --- template --------------------------------------------------------------------------------------------------------

SHIPPED = {"alpaca": "alpaca", "vicuna": "vicuna", "chatml": "chatml", "chatml_de": "chatml"}
BARE = ("default", "empty", "fewshot")  # no tokenizer has these
# of models of pictures, video or sound: qwen2_vl, llava_next, minicpm_v, qwen2_audio, qwen3_omni, glm4v, ...
OF_MEDIA = re.compile(r"(.*_)?(vl|v|o|llava|vision|video|audio|omni)(_.*)?|mllama|paligemma.*|pixtral|glm4(_5)?v.*")
OF_BOTH = ("gemma3", "gemma3n", "llama4")  # of models of texts and pictures, and without a system message
DATED = "mistral_small"  # has no system message, where its tokenizers' templates have one with the day's date
SYSTEMS = {  # of conversations that have none
    "alpaca": "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.",
    "vicuna": "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    "chatml_de": "Du bist ein freundlicher und hilfsbereiter KI-Assistent.",
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face.",
}


def _template(given: KeyReader) -> None:
    name = given.word("template")
    known = name in SYSTEMS
    if _is_text(given):
        ends = name == "llama3"
        why = "texts end with the tokenizer's eos, there with <|end_of_text|>" if ends else "texts have no template"
        given.note("template", "changed" if ends else "unneeded", why)
        given.off("default_system", why="texts have no system message")
        return
    if name in SHIPPED:
        why = "a bos token begins it where there is one, and what follows the end of a reply is not trained"
        given.set("template", f"{DATA}.template", SHIPPED[name], why)
    elif name in BARE:
        why = (
            f"{name}: the tokenizer's own is taken; give {DATA}.template alpaca, chatml, vicuna, plain or a Jinja file"
        )
        given.lose("template", why)
    elif OF_MEDIA.fullmatch(name):
        given.note(
            "template",
            "later",
            f"no models of images, video or sound, as those of {name} are, are trained here yet",
            alters=True,
        )
    elif name == DATED and not given.word("default_system"):
        why = (
            f"a conversation without a system message gets none from {name}, and from the templates of Mistral Small's "
            f"tokenizers one with the day's date; give default_system, or a Jinja file as {DATA}.template"
        )
        given.note("template", "refused", why, alters=True)
    else:
        own = f"the tokenizer's own template is used; give the tokenizer of a model that {name} is made for. "
        given.note("template", "changed", own + _difference(name))
    if given.has("default_system"):
        given.set("default_system", f"{DATA}.system", str(given.take("default_system")) or None)
    elif known:
        given.found.translation.settings[f"{DATA}.system"] = SYSTEMS[name]


def _difference(name: str) -> str:
    """Returns how the template of this name differs from that of the tokenizers of its models."""
    if name in SYSTEMS:
        return f"{name}'s own system message is in {DATA}.system"
    if name in OF_BOTH:
        return f"Of texts it makes what {name} makes; pictures, which {name} takes too, are not trained on here"
    return f"If {name} has a system message of its own in LLaMA-Factory, give it as {DATA}.system"


# --- data ------------------------------------------------------------------------------------------------------------


def _sources(given: KeyReader) -> None:
    directory = str(given.take("dataset_dir", "data"))
    if directory == "ONLINE":
        given.note("dataset_dir", "mapped", "the names of data sets are ids of the hub")
    else:
        given.set("dataset_dir", f"{DATA}.registry", directory)
    names = names_of(given, "dataset")
    weights = _weights(given, len(names))
    taken = [_source(given, name, weight) for name, weight in zip(names, weights, strict=True)]
    why = "a .txt file is one text, there each of its lines is; " if _is_text(given) else ""
    why += "rows that cannot be used are left out and counted, up to 5 % of a data set (bad_rows: drop; a "
    why += "larger share is refused until bad_rows names it, while LLaMA-Factory leaves out any number in silence)"
    given.set("dataset", f"{DATA}.train", taken, why)
    given.found.translation.settings[f"{DATA}.bad_rows"] = "drop"  # rows that are no conversation are left out there
    if given.has("max_samples"):
        given.note("max_samples", "changed", "samples of each data set, drawn at random; there the first")
    if given.switch("group_by_length"):
        why = "batches stay random, and are cut into micro-batches of like length"
        given.set("group_by_length", f"{DATA}.group_by_length", True, why)
    else:
        given.off("group_by_length")


def _source(given: KeyReader, name: str, weight: float | None) -> Any:
    samples = given.count("max_samples", 0) or None
    entry = {"samples": samples, "weight": weight}
    entry = {key: value for key, value in entry.items() if value is not None}
    return {"path": name, **entry} if entry else name


def _weights(given: KeyReader, count: int) -> list[float | None]:
    """Returns the weights of each data set; none if every sample comes once."""
    mix, shares = given.word("mix_strategy", "concat"), names_of(given, "interleave_probs")
    mixes = mix in ("interleave_under", "interleave_over") and count > 1
    if mixes:
        ends = "until the first set is through" if mix == "interleave_under" else "until each set was gone through once"
        why = f"an epoch goes on {ends}; shares are exact, and the next epoch goes on where a set stood"
        given.set("mix_strategy", f"{DATA}.mix", mix, why)
    elif mix in ("concat", "interleave_once") or count == 1:
        given.note("mix_strategy", "mapped", "each sample comes once an epoch, in random order")
    else:
        raise problem(f"{given.prefix}mix_strategy", f"{mix} was given", "give concat, interleave_under or another")
    if not shares or not mixes:
        given.off("interleave_probs", why="each sample comes once an epoch")
        return [1.0 if mixes else None] * count
    if len(shares) != count:
        why = f"{len(shares)} were given for {count} data sets"
        raise problem(f"{given.prefix}interleave_probs", why, "give one for each")
    given.note("interleave_probs", "mapped", "the weights of the data sets")
    return [_share(given, share) for share in shares]


def _share(given: KeyReader, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise problem(f"{given.prefix}interleave_probs", f"{text!r} was given", "give numbers above 0")
    return share


def _evaluation(given: KeyReader) -> None:
    """Translates evaluation: by default nothing is held out."""
    names, share = names_of(given, "eval_dataset"), given.number("val_size", 0.0)
    if names:
        given.set("eval_dataset", f"{DATA}.evaluation", [_source(given, name, None) for name in names])
        given.off("val_size", why="eval_dataset says it")
        return
    given.off("eval_dataset", why="there is none")
    if share < 1:
        why = "of each data set, there of all together" if share and len(names_of(given, "dataset")) > 1 else ""
        given.set("val_size", f"{DATA}.evaluation_fraction", share, why)
    elif given.switch("streaming") and not (_is_text(given) and _packs(given)):
        why = "the first rows of each data set, there of all together"
        given.set("val_size", f"{DATA}.evaluation_rows", round(share), why)
    else:
        why = f"a number of samples, and nothing would be held out; give their share as {DATA}.evaluation_fraction"
        given.lose("val_size", why)
        given.found.translation.settings[f"{DATA}.evaluation_fraction"] = 0.0


def _length(given: KeyReader) -> None:
    given.used.add("cutoff_len")
    asked = ", one place of a pack being left empty" if cutoff(given) < given.count("cutoff_len", CUTOFF) else ""
    if _is_text(given):
        why = "windows go round the whole text; there the rest of each 1,000 texts is left out" + asked
    elif STAGES[given.word("stage", "sft")].has_preferences:
        why = "of longer ones the end of the prompt and the beginning of the answer are kept, by other shares" + asked
    else:
        why = "of a longer conversation the beginning is kept; there prompt and reply share the cut" + asked
    given.set("cutoff_len", f"{DATA}.length", cutoff(given), why)


def _packing(given: KeyReader) -> None:
    key = "neat_packing" if given.switch("neat_packing") else "packing"
    if _is_text(given):
        wholly = "texts lie end to end in windows; there each is cut to cutoff_len and padded"
        packs = _packs(given)
        given.note(key, "mapped" if packs else "changed", "texts lie end to end in windows" if packs else wholly)
    elif _packs(given):
        sees = "" if key == "neat_packing" else ", and none sees another"
        why = f"a batch counts samples{sees}; there per_device_train_batch_size counts packs of cutoff_len tokens"
        given.set(key, f"{DATA}.packing", True, why)
    elif given.has("packing"):
        given.set("packing", f"{DATA}.packing", False)
    given.off("packing" if key == "neat_packing" else "neat_packing", why="packing is noted elsewhere")


def _streaming(given: KeyReader) -> None:
    if not given.switch("streaming"):
        given.off("streaming", "buffer_size", why="nothing is streamed")
    elif _is_text(given) and _packs(given):
        why = f"texts are read before training: {DATA}.stream would train on the first cutoff_len tokens of each alone"
        given.note("streaming", "changed", why)
        given.off("buffer_size", why="nothing is streamed")
    else:
        given.set("streaming", f"{DATA}.stream", True)
        given.set("buffer_size", f"{DATA}.stream_buffer", given.count("buffer_size", BUFFER))


def _train_on(given: KeyReader) -> None:
    everything, last = given.switch("train_on_prompt"), given.switch("mask_history")
    if everything and last:
        raise problem(f"{given.prefix}mask_history", "train_on_prompt and mask_history are both on", "keep one of them")
    if everything:
        given.set("train_on_prompt", f"{DATA}.train_on", "all")
    if last:
        why = "of a conversation over cutoff_len the last tokens are kept, there whole turns from the last on"
        given.set("mask_history", f"{DATA}.train_on", "last_response", why)
    given.off(*(key for key, on in (("train_on_prompt", everything), ("mask_history", last)) if not on))
