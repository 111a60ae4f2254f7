"""Decides how the rows of a data set are read: by its registry's entry, by what the user gave, or by its first rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain.config.language_data import DataSource
from drivetrain.config.language_stages import SampleKind
from drivetrain.data.language.guessed_formats import guess_formatting
from drivetrain.data.language.preference_rows import preference_problem, preferences_in
from drivetrain.data.language.prompt_forms import prompt_schema, with_reply_column
from drivetrain.data.language.registry import Entry
from drivetrain.data.language.row_schema import PREFERENCE, RowSchema
from drivetrain.data.language.scored_rows import scored_schema
from drivetrain.data.language.step_rows import COLUMNS as STEP_COLUMNS
from drivetrain.data.language.step_rows import marks_steps
from drivetrain.data.language.trl_rows import is_trl
from drivetrain.data.long_text import LongText
from drivetrain.data.rows import Rows
from drivetrain.errors import UserError, problem

LOOKED_AT = 20  # first rows, from which a format is guessed


def form_of(source: DataSource, entry: Entry | None, rows: Rows, field: str, kind: SampleKind) -> RowSchema:
    """Returns the schema of a source's rows, which hold samples of that kind. Raises UserError if they hold others."""
    form = _form_of(source, entry, rows, field, kind)
    if kind != "prompts" or form.ranking:
        return form
    return with_reply_column(replace(form, prompts=True), rows.read(0, LOOKED_AT))


def _form_of(source: DataSource, entry: Entry | None, rows: Rows, field: str, kind: SampleKind) -> RowSchema:
    fix = "give workload.stage=pretrain"
    if source.formatting == "text":
        raise problem(field, f"{source.path} holds texts, no conversations", fix)
    columns = {**(entry.columns if entry else {}), **source.columns}
    tags = {**(entry.tags if entry else {}), **source.tags}
    pairs, labels = kind == "pairs", kind == "labelled"
    if kind == "steps":
        return _form_of_steps(source, columns, tags, rows, field)
    if "kto_tag" in columns and not labels:
        why = f"its column {columns['kto_tag']} distinguishes replies to learn from those to avoid (KTO)"
        fix = "give workload.stage: kto, or leave out the rows that are to be avoided, and columns.kto_tag"
        raise problem(field, f"{source.path}: {why}", fix)
    if source.formatting != "auto":
        ranking, usual = entry is not None and entry.ranking, entry is None and not columns
        ranking = ranking or pairs or source.formatting == "trl"
        scored = pairs and source.formatting == "trl" and "completions" in columns
        schema = RowSchema(source.formatting, columns, tags, ranking, by_usual_names=usual, pairs=pairs, labels=labels)
        return replace(schema, scored=scored)
    if entry is not None:
        return RowSchema(entry.formatting, columns, tags, entry.ranking or pairs, pairs=pairs, labels=labels)
    first = rows.read(0, LOOKED_AT)
    if pairs:
        return _form_of_pairs(first, columns, tags, source.path, field)
    if labels and not {"messages", "prompt"} & columns.keys() and any("completion" in row for row in first):
        named = {"chosen": columns.get("response", "completion"), **columns}
        return RowSchema("trl", named, tags, ranking=True, labels=True)
    try:
        return replace(guess_formatting(first, field, source.path, columns, tags), labels=labels)
    except UserError as error:
        found = prompt_schema(first, source) if kind == "prompts" else None
        if found is not None:
            return found
        raise _no_conversations(error, first, source.path, field, kind) from None


def _no_conversations(
    error: UserError, first: Sequence[Mapping[str, Any]], path: str, field: str, kind: SampleKind
) -> UserError:
    """Returns the error that names what the rows hold instead, where that is known; else the error given."""
    held = preferences_in(first) if kind == "conversations" else None
    if held is not None:
        return UserError([preference_problem(path, held, field)])
    if not any(isinstance(row.get("text"), str | LongText) for row in first):
        return error
    why = f"{path} holds texts, and no conversations of a format that is known"
    return problem(field, why, "give workload.stage=pretrain, or formatting and columns")


def _form_of_steps(
    source: DataSource, columns: Mapping[str, str], tags: Mapping[str, str], rows: Rows, field: str
) -> RowSchema:
    if source.formatting not in ("auto", "trl"):
        why = f"{source.path}: answers that are marked step by step have no form in {source.formatting}"
        raise problem(field, why, "leave formatting out; rows are {prompt: ..., completions: [...], labels: [...]}")
    keys = keys_of(rows)
    lacking = [name for name in STEP_COLUMNS if columns.get(name, name) not in keys]
    if lacking:
        there = ", ".join(keys) or "nothing"
        why = f"rows of {source.path} have {there}: no column {' or '.join(map(repr, lacking))}"
        raise problem(
            field, why, "name them, columns: {completions: ..., labels: ...}, or leave preference.loss: steps out"
        )
    return RowSchema("trl", columns, tags, steps=True)


def _form_of_pairs(
    first: Sequence[Mapping[str, Any]], columns: Mapping[str, str], tags: Mapping[str, str], path: str, field: str
) -> RowSchema:
    keys = dict.fromkeys(key for row in first for key in row)
    lacking = [name for name in PREFERENCE if columns.get(name, name) not in keys]
    scored = scored_schema(first, columns) if len(lacking) == 2 else None
    if scored is not None:
        return replace(scored, tags=tags)
    if len(lacking) == 2 and marks_steps(first, columns):
        why = f"rows of {path} mark the steps of an answer, and the stage compares two answers"
        raise problem(field, why, "give workload.stage: reward with workload.preference.loss: steps")
    if lacking:
        why = f"rows of {path} have {', '.join(keys) or 'nothing'}: no column {' or '.join(map(repr, lacking))}"
        fix = "name them, columns: {chosen: ..., rejected: ...}, or give workload.stage: sft for one reply a row"
        raise problem(field, f"{why} of a pair of answers", fix)
    if is_trl(first, columns):
        return RowSchema("trl", columns, tags, ranking=True, pairs=True)
    return replace(guess_formatting(first, field, path, columns, tags), ranking=True, pairs=True)


def text_column_of(source: DataSource, entry: Entry | None, rows: Rows, field: str) -> str:
    """Returns the column of texts, which LLaMA-Factory calls the prompt."""
    if source.formatting not in ("auto", "text"):
        why = f"{source.path} holds conversations ({source.formatting}), no texts"
        raise problem(field, why, "give workload.stage=sft")
    if source.replace:
        raise problem(field, f"{source.path} holds texts, in which nothing is replaced", "leave replace out")
    columns = {**(entry.columns if entry else {}), **source.columns}
    unknown = sorted(columns.keys() - {"text", "prompt"})
    if unknown:
        raise problem(field, f"{source.path}: texts have no column {unknown[0]}", "give columns: {text: its name}")
    column = columns.get("text") or columns.get("prompt") or "text"
    keys = keys_of(rows)
    if column not in keys:
        why = f"no row of {source.path} has the column {column!r}; there are {', '.join(keys) or 'none'}"
        raise problem(field, why, "give columns: {text: its name}, or workload.stage=sft if these are conversations")
    return column


def keys_of(rows: Rows) -> dict[str, None]:
    return dict.fromkeys(key for row in rows.read(0, LOOKED_AT) for key in row)
