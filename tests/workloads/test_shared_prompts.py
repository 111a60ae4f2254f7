"""Answers to one prompt share its forward pass on a CPU: where, and what a batch then holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.micro_batches import Slice
from drivetrain.errors import OutOfMemory
from drivetrain.models.packed_attention import PackedAttention
from drivetrain.runtime.hardware import detect
from drivetrain.training.auto_settings import settle_rows
from drivetrain.training.batching import Batching, slice_of
from drivetrain.training.progress import Progress
from drivetrain.training.windows import _cut, stand_in_window
from drivetrain.training.workload_rules import check_workload
from drivetrain.workloads.build import build_workload
from drivetrain.workloads.loss_contract import NO_CONTEXT
from drivetrain.workloads.policy import PolicyWorkload
from tests.tiny_language import LLAMA, write_lines
from tests.tiny_workload import tiny_engine
from tests.workloads import policy_cases

CPU = replace(detect("cpu"), device="cpu")
GPU = Machine("cuda", "a GPU", 1, 2**36, 16, (9, 0), frozenset({"float32", "bfloat16"}))
PAIRS = [{"prompt": f"ask {n}", "chosen": "yes " * (n % 3 + 1), "rejected": "no " * (n % 4 + 1)} for n in range(8)]
LABELLED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(PAIRS)]
REWARDED = {"rewards": "exact_match", "answers": 4, "max_new_tokens": 6}


def run_of(folder: Path, stage: str = "dpo", model: Any = LLAMA, **more: Any) -> RunConfig:
    alone = [{"instruction": row["prompt"], "output": row["chosen"]} for row in PAIRS]
    rows: Any = {"grpo": alone, "kto": LABELLED}
    data = {"train": write_lines(folder / f"{stage}.jsonl", rows.get(stage, PAIRS)), "template": "plain", "length": 60}
    data |= {"evaluation_fraction": 0, "cache": str(folder / "cache"), **more.pop("data", {})}
    block = {"type": "language_model", "stage": stage, "model": {"config": model, **more.pop("options", {})}}
    block["preference"] = more.pop("preference", {})
    if stage == "grpo":
        block["reinforcement"] = REWARDED | more.pop("reinforcement", {})
    given = {"workload": {**block, "data": data}, "batch_size": 4, "loop": {"steps": 1}, "output": str(folder / "run")}
    return RunConfig.model_validate({**given, **more})


def settled(run: RunConfig, machine: Machine = CPU) -> Any:
    run = run.model_copy(update={"workload": run.workload.resolved(run, machine)})
    work = build_workload(run.workload, run.seed, run.adapter)
    settle_rows(run, machine, work, compiles=False)
    return work


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["dpo", "orpo", "kto", "reward", "grpo"])
def test_prompts_are_shared_by_answers_on_a_cpu(stage: str, tmp_path: Path) -> None:
    work = settled(run_of(tmp_path, stage))
    assert work.shares_prompts
    assert work.facts["prompts_shared"] is True


UNSHARED: dict[str, tuple[dict[str, Any], str]] = {
    "padded": ({"data": {"packing": False}}, "not packed"),
    "dropout": ({"model": {**LLAMA, "attention_dropout": 0.1}}, "drops out at random (attention_dropout)"),
    "window": ({"model": {**LLAMA, "model_type": "mistral", "sliding_window": 32}}, "a window of 32 positions"),
    "noise": ({"options": {"neftune_alpha": 5.0}}, "noise on embeddings"),
    "adapter": ({"adapter": {"method": "lora", "dropout": 0.1}}, "adapters drop out"),
}


@pytest.mark.parametrize(("more", "why"), UNSHARED.values(), ids=UNSHARED)
def test_what_would_compute_otherwise_shares_none(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, **more)
    work = settled(run)
    assert not work.shares_prompts
    assert why in work.why_not_shared(run, CPU)


def test_other_devices_and_single_answers_share_none(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert not settled(run, GPU).shares_prompts
    assert "CPUs alone" in settled(run).why_not_shared(run, GPU)


@pytest.mark.parametrize("preference", [{"loss": "apo_zero_unpaired"}, {"reference": "cached"}], ids=str)
def test_labelled_answers_are_alone_where_no_pass_of_the_reference_reads_others(
    preference: dict[str, Any], tmp_path: Path
) -> None:
    run = run_of(tmp_path, "kto", preference=preference)
    work = settled(run)
    assert not work.shares_prompts
    assert "one answer" in work.why_not_shared(run, CPU)
    assert "prompts_shared" not in work.facts


def test_a_window_as_long_as_any_sample_is_none(tmp_path: Path) -> None:
    assert settled(run_of(tmp_path, model={**LLAMA, "model_type": "mistral", "sliding_window": 60})).shares_prompts


def test_a_model_that_cannot_be_packed_shares_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = settled(run_of(tmp_path))
    assert work.lengths != unshared_lengths(work)
    monkeypatch.setattr("drivetrain.workloads.language_build.use_packed_attention", lambda *_, **__: None)
    work.build_model()
    assert not work.shares_prompts


# --- what a batch holds -----------------------------------------------------------------------------------------------


def unshared_lengths(work: Any) -> list[int]:
    work.shares_prompts = False
    found = list(work.lengths)
    work.shares_prompts = True
    return found


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_a_shared_prompt_lies_in_a_row_once_and_counts_once(stage: str, tmp_path: Path) -> None:
    work = settled(run_of(tmp_path, stage))
    pairs = [work.train.load(index, 0) for index in range(3)]
    assert all(pair.shared >= len("ask 1") - 1 for pair in pairs)
    batch = work.collate(pairs)
    places = batch["input_ids"].numel()
    ends = 0 if stage == "dpo" else 2 * len(pairs)  # a reward model sees answers' last tokens too
    assert places == sum(work.lengths[:3]) + ends
    apart = unshared_lengths(work)
    assert [one - other for one, other in zip(apart, work.lengths, strict=True)][:3] == [pair.shared for pair in pairs]
    firsts = [int(batch["position_ids"][0, place]) for place in begins(batch["position_ids"][0])]
    assert firsts == [first for pair in pairs for first in (0, pair.shared)]


def begins(positions: Tensor) -> list[int]:
    return [n for n, at in enumerate(positions.tolist()) if not n or at != positions[n - 1] + 1]


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_numbers_are_those_of_answers_apart(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = settled(run_of(tmp_path, stage))
    torch.manual_seed(0)
    model = work.build_model()
    pairs = [work.train.load(index, 0) for index in range(len(PAIRS))]
    seen: list[int] = []
    attend = PackedAttention.__call__

    def spied(self: PackedAttention, *given: Any, **how: Any) -> Any:
        seen.append(given[4].shape[1])
        return attend(self, *given, **how)

    monkeypatch.setattr(PackedAttention, "__call__", spied)
    found = []
    for shares in (True, False):
        work.shares_prompts = shares
        rows = work.predict(model, work.collate(pairs))
        found.append([value for row in rows for value in row.values()])
    assert set(seen) == {1, 2}, "rows with branches, then without"
    assert found[0] == pytest.approx(found[1], rel=1e-6, abs=2e-6)


def test_answers_of_a_group_share_their_prompt_and_are_found_whole_again(tmp_path: Path) -> None:
    work: PolicyWorkload = policy_cases.workload(tmp_path)
    model = policy_cases.built(work)
    samples = grouped()
    found = []
    for shares in (True, False):
        work.shares_prompts = shares
        batch = work.collate(samples)
        found.append(work.loss_sums(model, batch, NO_CONTEXT))
        whole = work._whole(batch)
        assert [each.tolist() for each in whole] == [each["ids"].tolist() for each in samples]
        assert work.counts(batch)["loss"] == len(samples)
    assert len(begins(batch["position_ids"][0])) == len(samples)
    for name, value in found[0].items():
        assert value.item() == pytest.approx(found[1][name].item(), rel=1e-5), name


@pytest.mark.parametrize("shares", [True, False])
def test_answers_that_were_made_are_cut_by_the_tokens_that_their_batches_have(shares: bool, tmp_path: Path) -> None:
    work: PolicyWorkload = policy_cases.workload(tmp_path)
    policy_cases.built(work)
    work.shares_prompts, work.made, most = shares, grouped(), 24
    mine = Slice(0, 1, len(work.made), most_made=most)
    window, largest = _cut(work, work.made, np.arange(len(work.made)), mine)
    sizes = [each.tensors["input_ids"].numel() for each in window]
    assert len(sizes) == (3 if shares else 4)
    assert max(sizes) <= most
    assert largest == max(len(each.positions) for each in window if each.positions is not None)


def test_on_a_cpu_long_answers_run_in_parts_and_a_bound_in_tokens_is_taken(tmp_path: Path) -> None:
    run = run_of(tmp_path, "grpo", reinforcement={"max_new_tokens": 900}, batch_size=2)
    work: Any = settled(run)
    assert bounds_met(run, work) == (2048, [2, 2, 2, 2])
    bounded = run.model_copy(update={"micro_batch_tokens": 4000})
    check_workload(bounded, work)
    assert bounds_met(bounded, work) == (4000, [4, 4])
    assert bounds_met(run.model_copy(update={"micro_batch_size": 8}), work) == (None, [8])


def test_a_bound_that_the_run_file_leaves_out_is_halved_too_where_memory_runs_out(tmp_path: Path) -> None:
    run = run_of(tmp_path, "grpo", reinforcement={"max_new_tokens": 900}, batch_size=2)
    work: Any = settled(run)
    order, sent = work.order(2, 0, by_epochs=False), list[Any]()
    batching = Batching(run, CPU, work, tiny_engine(work), order, 1, sent.append, run)
    for most, size in ((1024, 2), (512, 1)):
        with pytest.raises(OutOfMemory) as raised, batching.bounding():  # as ranks that are started again learn of it
            raise OutOfMemory("no room", 2 * size)
        assert raised.value.tokens == 2 * most
        batching.cut_smaller(Progress(), 2 * size)
        assert (batching.slice.most_made, batching.slice.micro_batch_size) == (most, size)


def bounds_met(run: RunConfig, work: Any) -> tuple[int | None, list[int]]:
    """The bound in tokens, and the answers of each micro-batch of a step whose answers are as long as allowed."""
    mine = slice_of(run, CPU, work, 0, 1)
    window = stand_in_window(work, work.order(2, 0, by_epochs=False), mine)
    return mine.most_made, [0 if each.positions is None else len(each.positions) for each in window.micro_batches]


def grouped() -> list[dict[str, Any]]:
    """Two prompts, with three answers each."""
    samples = policy_cases.made()
    for first in (0, 3):
        prompt = samples[first]["ids"][: samples[first]["prompt"]]
        for each in samples[first : first + 3]:
            each["ids"] = torch.cat([prompt, each["ids"][each["prompt"] :]])
            each["prompt"] = len(prompt)
    return samples
