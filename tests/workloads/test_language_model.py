"""Batches, losses and metrics of language models, against Transformers' forward and PyTorch's loss on each sample."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.state import same
from drivetrain.workloads.base import Batch
from drivetrain.workloads.language_model import LanguageModelWorkload
from tests.tiny_language import (
    BLOOM,
    IGNORED,
    LLAMA,
    ROBERTA,
    ROWS,
    chatml,
    loaded,
    plain_loss,
    talk,
    workload,
    write_lines,
)

MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 128}
WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, fused loss": {"model": {"fused_loss": True}},
    "padded": {"packing": False},
    "padded, fused loss": {"packing": False, "model": {"fused_loss": True}},
    "packed, a window of attention": {"model": {"config": MISTRAL}},
    "packed, learned positions": {"model": {"config": GPT2}},
    "no positions in its forward": {"model": {"config": BLOOM}},
    "positions that begin elsewhere": {"model": {"config": ROBERTA}},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def built(work: LanguageModelWorkload) -> nn.Module:
    torch.manual_seed(0)
    return work.build_model().eval()


def as_published(model: Any) -> Any:
    """The same weights in Transformers' own model, without anything of ours around or within it."""
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    return plain.eval()


def batch_of(work: LanguageModelWorkload, *indices: int) -> Batch:
    return work.collate([work.train.load(index, 0) for index in indices or range(len(work.train))])


# --- batches ----------------------------------------------------------------------------------------------------------


def test_targets_are_the_next_tokens_of_replies_and_padding_has_none(tmp_path: Path) -> None:
    work = workload(tmp_path, [talk("a", "bc"), talk("de", "fghi")], packing=False)
    batch = batch_of(work)
    longest = max(len(chatml(*each)[0]) for each in (("a", "bc"), ("de", "fghi"))) - 1
    for row, (ids, trained) in enumerate([chatml("a", "bc"), chatml("de", "fghi")]):
        empty = longest - len(ids) + 1
        goals = [token if target else IGNORED for token, target in zip(ids[1:], trained[1:], strict=True)]
        assert batch["input_ids"][row].tolist() == ids[:-1] + [0] * empty
        assert batch["targets"][row].tolist() == goals + [IGNORED] * empty
        assert batch["position_ids"][row].tolist() == list(range(longest))
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert work.count(batch) == len(b"bc") + len(b"fghi") + 2


def test_packed_samples_lie_in_one_row_in_which_positions_begin_again(tmp_path: Path) -> None:
    work = workload(tmp_path, ROWS)
    built(work)
    assert work.packs
    samples = loaded(work.train)
    order = [3, 0, 7]
    batch = batch_of(work, *order)
    assert batch["input_ids"].tolist() == [[token for index in order for token in samples[index][0][:-1]]]
    assert batch["position_ids"].tolist() == [[place for i in order for place in range(len(samples[i][0]) - 1)]]
    first_places = (batch["position_ids"][0] == 0).nonzero().flatten()
    assert batch["targets"][0][first_places].tolist() == [IGNORED] * 3  # the second token of a sample is its prompt's
    assert work.count(batch) == sum(sum(samples[index][1]) for index in order)


def test_the_first_token_of_a_sample_is_no_target_of_the_one_before_it(tmp_path: Path) -> None:
    work = workload(tmp_path, ROWS, train_on="all")
    built(work)
    samples = loaded(work.train)
    assert all(trained[0] for _, trained in samples)
    batch = batch_of(work, 0, 1)
    assert batch["targets"].tolist() == [[*samples[0][0][1:], *samples[1][0][1:]]]


def test_windows_of_text_have_a_target_at_every_place(tmp_path: Path) -> None:
    work = workload(tmp_path, [{"text": "0123456789" * 20}], stage="pretrain", length=16)
    batch = batch_of(work, 0, 1)
    assert bytes(batch["input_ids"][1].tolist()) == b"6789012345678901"
    assert bytes(batch["targets"][1].tolist()) == b"7890123456789012"
    assert work.count(batch) == 32
    assert not work.packs


def test_lengths_are_known_of_conversations_and_only_where_batches_follow_them(tmp_path: Path) -> None:
    packed = workload(tmp_path, ROWS, group_by_length=False)
    inputs = [len(ids) - 1 for ids, _ in loaded(packed.train)]
    assert packed.lengths == inputs  # also before the model is built, when run files are checked
    assert workload(tmp_path, ROWS, packing=False).lengths == inputs
    assert workload(tmp_path, ROWS, packing=False, group_by_length=False).lengths is None
    assert workload(tmp_path, ROWS, stream=True).lengths is None
    assert workload(tmp_path, [{"text": "x" * 99}], stage="pretrain").lengths is None


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_loss_and_gradients_are_plain_pytorch_s_on_each_sample_alone(way: dict[str, Any], tmp_path: Path) -> None:
    work = workload(tmp_path, ROWS, **way)
    model = built(work)
    batch = batch_of(work)
    loss = work.loss_sum(model, batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain = as_published(model)
    losses = [plain_loss(plain, ids, trained)[0] for ids, trained in loaded(work.train)]
    expected = torch.cat(losses).sum()
    expected.backward()
    assert work.count(batch) == sum(map(len, losses))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_evaluation_and_prediction_are_those_of_plain_pytorch(way: dict[str, Any], tmp_path: Path) -> None:
    work = workload(tmp_path, ROWS, **way)
    model = built(work)
    batch = batch_of(work)
    outputs, rows = work.outputs(model, batch), work.predict(model, batch)
    metric = work.metrics()["token_accuracy"]
    metric.update(outputs.predictions, outputs.targets)
    with torch.no_grad():
        found = [plain_loss(as_published(model), *each) for each in loaded(work.train)]
    losses, logits, targets = zip(*found, strict=True)
    assert outputs.count == sum(map(len, losses))
    torch.testing.assert_close(outputs.loss_sum, torch.cat(losses).sum(), rtol=1e-6, atol=1e-6)
    assert outputs.targets.tolist() == torch.cat(targets).tolist()
    assert outputs.predictions.tolist() == torch.cat(logits).argmax(-1).tolist()
    accuracy = (torch.cat(logits).argmax(-1) == torch.cat(targets)).float().mean()
    assert float(metric.compute()) == pytest.approx(float(accuracy))
    assert [row["tokens"] for row in rows] == list(map(len, losses))
    assert [row["loss"] for row in rows] == pytest.approx([float(each.mean()) for each in losses], abs=2e-6)


def test_perplexity_is_the_exponential_of_the_loss_and_overflows_into_no_error(tmp_path: Path) -> None:
    work = workload(tmp_path, ROWS)
    assert work.derived({"loss": 2.0})["perplexity"] == pytest.approx(math.e**2)
    assert math.isfinite(work.derived({"loss": 1e9})["perplexity"])
    assert (work.best_metric.name, work.best_metric.higher_is_better) == ("loss", False)


def test_likeliest_tokens_beyond_the_tokenizer_are_wrong_ones(tmp_path: Path) -> None:
    """Models are often published with more rows than their tokenizer has tokens."""
    work = workload(tmp_path, ROWS, model={"config": {**LLAMA, "vocab_size": 1000}})
    metric = work.metrics()["token_accuracy"]
    metric.update(torch.tensor([999, 3, 4]), torch.tensor([1, 3, 5]))
    assert float(metric.compute()) == pytest.approx(1 / 3)


def test_a_batch_without_targets_counts_for_nothing(tmp_path: Path) -> None:
    """Such as rows of a stream that are left out."""
    work = workload(tmp_path, ROWS)
    model = built(work)
    nothing = np.zeros(2, np.int32), np.zeros(2, dtype=bool)
    batch = work.collate([nothing, nothing])
    assert work.count(batch) == 0
    loss = work.loss_sum(model, batch)
    loss.backward()
    assert float(loss.detach()) == 0
    outputs, metric = work.outputs(model, batch), work.metrics()["token_accuracy"]
    full = work.outputs(model, batch_of(work))
    for each in (outputs, full):
        metric.update(each.predictions, each.targets)
    assert (float(outputs.loss_sum), outputs.count) == (0, 0)
    assert float(metric.compute()) == pytest.approx(float((full.predictions == full.targets).float().mean()))
    assert work.predict(model, batch) == [{"loss": 0.0, "tokens": 0}] * 2


@pytest.mark.parametrize(("architecture", "why"), [(BLOOM, "takes no positions"), (ROBERTA, "in its own way")])
def test_a_model_that_cannot_be_packed_is_padded_with_a_warning(
    architecture: dict[str, Any], why: str, tmp_path: Path
) -> None:
    work = workload(tmp_path, ROWS, model={"config": architecture})
    built(work)
    assert not work.packs
    assert batch_of(work, 0, 1, 2)["input_ids"].shape[0] == 3
    assert [why in warning for warning in work.warnings] == [True]
    assert work.facts["packed"] is False


def test_pretraining_packs_nothing_and_says_nothing_of_it(tmp_path: Path) -> None:
    work = workload(tmp_path, [{"text": "x" * 999}], stage="pretrain", model={"config": ROBERTA})
    built(work)
    assert not work.warnings


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_saved_tokenizer_renders_the_same_chat_and_encodes_the_same_ids(tmp_path: Path) -> None:
    work = workload(tmp_path, [talk("Grüße", "naïve"), *ROWS], evaluation_fraction=0.01)
    work.save_assets(built(work), tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    messages = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "naïve"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\nnaïve<|im_end|>\n"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == loaded(work.train)[0][0]
    assert loaded(work.train)[0] == chatml("Grüße", "naïve")
    assert "drivetrain" not in (tmp_path / "saved" / "config.json").read_text()


RUN = """
workload:
  type: language_model
  stage: sft
  model:
    config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 2, max_position_embeddings: 128, attention_dropout: 0.1}}
    neftune_alpha: 5
  data: {{train: {folder}/train.jsonl, template: chatml, length: 96, evaluation_fraction: 0.2, cache: {folder}/cache}}
output: {folder}/out
batch_size: 6
micro_batch_size: 4
loop: {{steps: 6, max_grad_norm: 1.0}}
optimizer: {{name: adamw, lr: 1.0e-2}}
schedule: {{name: cosine, warmup_steps: 2}}
evaluation: {{every_steps: 3}}
checkpoints: {{every_steps: 3, keep_last: 2}}
tracking: {{log_every: 1}}
"""


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [each for each in found if each["event"] == kind]


def test_a_fine_tuned_model_is_evaluated_predicts_and_resumes_to_the_bit(
    drivetrain: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    write_lines(tmp_path / "train.jsonl", ROWS)
    run, out, interrupted = tmp_path / "run.yaml", tmp_path / "out", tmp_path / "interrupted"
    run.write_text(RUN.format(folder=tmp_path))
    code, _, reported = drivetrain("train", str(run), "--quiet")
    assert code == 0, reported
    last = out / "checkpoints" / "step-00000006"
    evaluations = [each["metrics"] for each in events(out, "evaluation")]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]

    # what lies in the checkpoint is a model of Transformers, which has the losses that were predicted
    code, printed, reported = drivetrain("predict", str(run), "--checkpoint", str(last))
    assert code == 0, reported
    rows = [json.loads(line) for line in printed.splitlines()]
    assert len(rows) == 4
    model, talks = AutoModelForCausalLM.from_pretrained(last).eval(), dict(enumerate(ROWS, start=1))
    tokenizer = AutoTokenizer.from_pretrained(last)
    words: list[float] = []
    for row in rows:
        each = talks[int(row["sample"].removeprefix("train.jsonl line "))]
        ids, trained = chatml(each["instruction"], each["output"])
        messages = [{"role": "user", "content": each["instruction"]}, {"role": "assistant", "content": each["output"]}]
        assert tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] == ids
        with torch.no_grad():
            losses, _, _ = plain_loss(model, ids, trained)
        assert row["tokens"] == len(losses)
        assert row["loss"] == pytest.approx(float(losses.mean()), abs=2e-5)
        words += losses.tolist()

    code, printed, reported = drivetrain("evaluate", str(run), "--checkpoint", str(last))
    assert code == 0, reported
    measured = json.loads(printed)["metrics"]
    assert measured == evaluations[-1]
    assert measured["loss"] == pytest.approx(sum(words) / len(words), rel=1e-5)
    assert measured["perplexity"] == pytest.approx(math.exp(measured["loss"]))

    shutil.copytree(out, interrupted)
    shutil.rmtree(interrupted / "checkpoints" / last.name)
    code, _, reported = drivetrain("train", str(run), f"output={interrupted}", "--quiet", "--resume")
    assert code == 0, reported
    one, other = load(last), load(interrupted / "checkpoints" / last.name)
    for part in ("model", "optimizer"):
        assert same(one[part], other[part]), part
    curve = [(each["step"], each["loss"], each["grad_norm"]) for each in events(out, "step")]
    again = [(each["step"], each["loss"], each["grad_norm"]) for each in events(interrupted, "step")]
    assert again[-3:] == curve[-3:]
    assert [step for step, _, _ in again[-3:]] == [4, 5, 6]
