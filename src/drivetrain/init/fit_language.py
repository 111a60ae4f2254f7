"""Fits a language model's recipe to conversations, preferences or texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.config.language_stages import STAGES
from drivetrain.errors import UserError, counted, problem
from drivetrain.init.data_kinds import Conversations, Documents, PreferenceRows, is_chinese
from drivetrain.init.fitted import Fitted, fit_batch, fit_precision

HELD_OUT = {10: 0.1, 5: 0.2}  # at least so many rows → a share that holds out one of them, a bad one left out
FEW_ROWS = 20  # a recipe's 5 % of fewer may be none
LR = 3.0e-4  # of preferences from scratch, which a recipe of conversations would learn by heart in a few steps
LEFT_OUT = "Rows that cannot be used are left out, up to 5 % of them, and counted (bad_rows)."
# what rows hold → the usual stage, and a comment with the others
USUAL_STAGES = {
    "pairs": ("dpo", "or orpo, simpo, cpo, which need no reference; reward: a model that scores answers"),
    "labelled": ("kto", "dpo, orpo, simpo, cpo and reward read pairs of answers instead (chosen, rejected)"),
}
QUICKER_ON = ("cpu", "cuda")  # in 16 bits
MOST_DISTINCT = 8000  # characters that a model may have one by one


def conversations(run: Any, kind: Conversations, made: Fitted, stem: str) -> None:
    del stem
    _check_stage(run, ("conversations", "prompts"), "Conversations")
    _take(run, {"path": kind.path, "formatting": kind.formatting}, kind.columns)
    _from_scratch(run, kind.sample, "1.0e-5", made)
    chinese = " (Chinese)" if is_chinese(kind.sample) else ""
    made.decisions += [
        f"{counted(kind.rows, 'row')} in the format of {kind.formatting}{chinese}; replies are trained, the rest is "
        "only read.",
        *_of_columns(kind.columns),
        LEFT_OUT,
    ]
    _hold_out(run, kind.rows, made)
    _precision(run, made)
    fit_batch(run, kind.rows * (1 - run["workload"]["data"]["evaluation_fraction"]), made)


def preferences(run: Any, kind: PreferenceRows, made: Fitted, stem: str) -> None:
    """Changes a recipe of conversations to the usual stage for such rows; one of a stage that reads them keeps it."""
    del stem
    workload = run["workload"]
    samples = _check_stage(run, ("conversations", kind.holds), "Preferences")
    if samples == "conversations":
        workload["stage"], others = USUAL_STAGES[kind.holds]
        workload.yaml_add_eol_comment(others, "stage")
        workload.pop("generate", None)
        run["optimizer"]["lr"] = LR
    _take(run, {"path": kind.path}, kind.columns)
    _from_scratch(run, kind.sample, "1.0e-6", made)
    what = (
        "a chosen and a rejected answer"
        if kind.holds == "pairs"
        else "an answer labelled as one to learn from or to avoid"
    )
    chinese = " (Chinese)" if is_chinese(kind.sample) else ""
    made.decisions += [
        f"{counted(kind.rows, 'row')}{chinese}, each with {what}, for stage {workload['stage']}.",
        "Preferences teach most to a model that answers already: one of your own, or of a run of stage sft.",
        *_of_columns(kind.columns),
        LEFT_OUT,
    ]
    _hold_out(run, kind.rows, made)
    _precision(run, made)
    fit_batch(run, kind.rows * (1 - workload["data"]["evaluation_fraction"]), made)


def _check_stage(run: Any, known: tuple[str, ...], what: str) -> str:
    """Returns the kind of samples that the recipe's stage reads. Raises UserError if it is not among those known."""
    stage = run["workload"].get("stage", "pretrain")
    samples = STAGES[stage].samples
    if samples not in known:
        raise problem("RECIPE", f"{what} were given, and the recipe's stage {stage} does not read them", "leave it out")
    return samples


def _take(run: Any, source: dict[str, Any], columns: Mapping[str, str]) -> None:
    """Puts the user's data in place of the recipe's."""
    data = run["workload"]["data"]
    if columns:
        source["columns"] = dict(columns)
    data.pop("registry", None)
    data["train"] = [source]
    data["bad_rows"] = "drop"


def _from_scratch(run: Any, sample: Sequence[str], lr: str, made: Fitted) -> None:
    """Fits the tokenizer of a recipe whose model begins from scratch. lr: for a model that was trained before."""
    model, characters = run["workload"]["model"], sum(map(len, sample))
    if "path" in model:
        made.decisions.append(
            f"The model is the recipe's, {model['path']}: put yours there, or name its folder in workload.model.path."
        )
        return
    size = 8000 if characters > 200_000 else 2000 if characters > 30_000 else 400
    model["vocabulary_size"] = size
    model.yaml_set_comment_before_after_key(
        "tokenizer",
        before="from scratch, to see it work; to fine-tune a model of your own give path: FOLDER in place of all "
        f"this, leave template out, and lower the learning rate (lr: {lr})",
        indent=4,
    )
    made.decisions.append(f"A small Llama from scratch, with a tokenizer of {size:,} tokens made of these texts.")


def _of_columns(columns: Mapping[str, str]) -> list[str]:
    return [f"Columns: {', '.join(f'{own} is {found}' for own, found in columns.items())}."] if columns else []


def _hold_out(run: Any, rows: int, made: Fitted) -> None:
    """Changes the share that is held out where it is none of so few rows; of fewer than five all are trained."""
    data = run["workload"]["data"]
    data.setdefault("evaluation_fraction", 0.1)
    if rows < min(HELD_OUT):
        data["evaluation_fraction"] = 0
        run["workload"].pop("generate", None)
        run.get("evaluation", {}).pop("metric", None)
        made.decisions.append("There are too few rows to hold any out: there is no evaluation, and no best checkpoint.")
    elif rows < FEW_ROWS:
        share = next(share for least, share in HELD_OUT.items() if rows >= least)
        data["evaluation_fraction"] = max(share, data["evaluation_fraction"])
        made.decisions.append(f"{data['evaluation_fraction']:.0%} of the rows are held out for evaluation.")


def _precision(run: Any, made: Fitted) -> None:
    """Fits the precision, unless the recipe names one."""
    if "precision" not in run:
        fit_precision(run, made, QUICKER_ON)


def documents(run: Any, kind: Documents, made: Fitted, stem: str) -> None:
    del stem
    data, model = run["workload"]["data"], run["workload"]["model"]
    distinct = len(set(kind.sample))
    data["train"] = kind.path
    if model.get("tokenizer") == "characters" and distinct > MOST_DISTINCT:
        model["tokenizer"], model["vocabulary_size"] = "bpe", 8000
    chinese = is_chinese([kind.sample])
    made.decisions += [
        f"{counted(kind.characters, 'character')}{' (Chinese)' if chinese else ''}; a token is "
        f"{'a character' if model.get('tokenizer') == 'characters' else 'a piece of a word'}.",
        "To go on with a model of your own, give path: FOLDER in place of tokenizer and config.",
    ]
    windows = kind.characters * 0.9 / int(data.get("length", 256))
    if windows < 10:
        raise _too_short(kind)
    _precision(run, made)
    fit_batch(run, windows, made)


def _too_short(kind: Documents) -> UserError:
    characters = counted(kind.characters, "character")
    if not kind.others:
        why = f"{kind.path} has {characters}: too few to learn a language from"
        return problem("--data", why, "give a longer text")
    why = f"the texts of {kind.path} have {characters} in all, too few to learn a language from"
    labels = f"none of its other columns ({', '.join(kind.others[:20])}) could be labels: a few values that repeat"
    return problem("--data", f"{why}, and {labels}", "give more rows; name the column of labels by --label-column NAME")
