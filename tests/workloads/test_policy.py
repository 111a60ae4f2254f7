"""Answers made to learn from: their draws, rewards and log-probabilities; reward models; evaluation by answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from drivetrain.data.loader import MicroBatch
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import RunError, UserError
from drivetrain.generation import local_forward
from drivetrain.generation.passes import Passes
from drivetrain.runtime.journal import Journal
from drivetrain.training.evaluation import Evaluations, evaluate
from drivetrain.training.progress import Progress
from drivetrain.training.windows import stand_in_window
from drivetrain.workloads.made_answers import correction_of, draw_of
from drivetrain.workloads.policy import PolicyWorkload
from drivetrain.workloads.rewarding import _Failures
from tests.parity.policy_cases import run_config
from tests.tiny_language import LLAMA, write_lines
from tests.tiny_workload import tiny_engine
from tests.workloads.policy_cases import LONGEST, ROWS, built, log_probabilities, workload

LETTERS = {"use": "tests.rewards.scores:letters"}


def passes_of(work: PolicyWorkload, journal: Journal | None = None) -> tuple[Engine, Passes]:
    engine = tiny_engine(work)
    return engine, Passes(engine, work, Communicator(), 4, journal)


def made_of(work: PolicyWorkload, passes: Passes, count: int = 2) -> list[list[dict[str, Any]]]:
    prompts = [work.train.load(index, 0) for index in range(count)]
    return [list(each) for each in work.make_samples(prompts, [11, 12][:count], passes)]


def test_each_prompt_has_a_group_of_answers_with_rewards_and_log_probabilities(tmp_path: Path) -> None:
    work = workload(tmp_path, rewards=[LETTERS, {**LETTERS, "name": "half", "weight": 0.5}], temperature=1.5, updates=2)
    _, passes = passes_of(work)
    groups = made_of(work, passes)
    assert [len(group) for group in groups] == [3, 3]
    plain = built(workload(tmp_path))
    for sample in (sample for group in groups for sample in group):
        ids, prompt = sample["ids"].tolist(), sample["prompt"]
        assert 1 <= len(ids) - prompt <= LONGEST
        assert sample["truncated"] == (ids[-1] not in work.ends)
        text = work.decoded(ids[prompt:])
        expected = sum(letter.isascii() and letter.isalpha() for letter in text)
        assert sample["values"] == {"letters": expected, "half": expected}
        assert sample["reward"] == 1.5 * expected
        with torch.no_grad():
            torch.testing.assert_close(sample["old"], log_probabilities(plain, sample, 1.5), rtol=1e-4, atol=1e-5)
    assert len({tuple(sample["ids"].tolist()) for sample in groups[0]}) == 3


def test_the_generators_log_probabilities_are_measured_at_the_temperature_and_weigh_tokens(tmp_path: Path) -> None:
    work = workload(tmp_path, rewards=[LETTERS], temperature=1.5, importance_cap=1.25)
    groups = made_of(work, passes_of(work)[1])
    plain = built(workload(tmp_path))
    for sample in (sample for group in groups for sample in group):
        with torch.no_grad():
            torch.testing.assert_close(sample["drawn"], log_probabilities(plain, sample, 1.5), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sample["correction"], torch.ones_like(sample["old"]), rtol=1e-4, atol=0)
    apart = {"old": torch.tensor([-1.0, -2.0, -3.0]), "drawn": torch.tensor([-1.1, -1.0, -4.0])}
    expected = [math.exp(0.1), math.exp(-1.0), 1.25]
    assert correction_of(apart, work._learning).tolist() == pytest.approx(expected)
    assert correction_of({**apart, "drawn": torch.zeros(0)}, work._learning).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("packing", [True, False])
def test_answers_that_one_update_learns_from_need_no_pass_before_it(tmp_path: Path, packing: bool) -> None:
    """The loss and the gradient are those of log-probabilities that were computed before."""
    work = workload(tmp_path, rewards=[LETTERS], data={"packing": packing})
    engine, passes = passes_of(work)
    samples = [sample for group in made_of(work, passes) for sample in group]
    assert [bool(each["old"].isnan().any()) for each in samples] == [False, *[True] * 5]
    work.keep_made(0, samples)
    metrics = work.rollout().metrics
    assert 0 <= metrics["mismatch"] < 1e-5
    assert metrics["entropy"] == pytest.approx(-float(torch.cat([each["drawn"] for each in samples]).mean()), rel=1e-4)
    before = [{**each, "old": log_probabilities(built(work), each).detach()} for each in work.made]
    found = []
    for some in (work.made, before):
        loss = engine.summed(engine.forward_backward([MicroBatch(work.collate(some))])).item()
        found.append((loss, engine.optimizer_step(0.0).grad_norm.item()))
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-7)
    assert found[0][1] > 1e-3


def test_answers_of_a_journal_keep_the_probabilities_that_they_were_drawn_with(tmp_path: Path) -> None:
    """Whatever model goes on; of a journal of an earlier version, which has tokens alone, none are known."""
    given: dict[str, Any] = {"rewards": [LETTERS], "updates": 2}
    first = made_of(work := workload(tmp_path, **given), passes_of(work, Journal(tmp_path / "j", 0, "a"))[1])
    work = workload(tmp_path, **given)
    engine, passes = passes_of(work, Journal(tmp_path / "j", 0, "a"))
    engine.load_weights({name: weight * 2 for name, weight in engine.weights().items()})
    again = made_of(work, passes)
    for one, other in zip((x for group in first for x in group), (x for group in again for x in group), strict=True):
        assert torch.equal(one["drawn"], other["drawn"])
        assert not torch.equal(one["old"], other["old"])
    old = Journal(tmp_path / "old", 0, "a")
    work = workload(tmp_path, rewards=[LETTERS], importance_cap=2.0)
    _, passes = passes_of(work, old)
    prompts = [work.train.load(0, 0)]
    asked = work._prompt(prompts[0])
    keys = [old.key("answer", draw_of(11, number), list(asked.ids)) for number in range(3)]
    old.keep_all({key: [97, 98, 99][: number + 1] for number, key in enumerate(keys)})
    [group] = work.make_samples(prompts, [11], passes)
    assert [len(each["drawn"]) for each in group] == [0, 0, 0]
    assert [each["correction"].tolist() for each in group] == [[1.0], [1.0] * 2, [1.0] * 3]


def test_what_a_journal_has_is_neither_answered_nor_rewarded_again(tmp_path: Path) -> None:
    file = tmp_path / "asked.txt"
    reward = {"use": "tests.rewards.scores:counted", "options": {"file": str(file)}}
    first = made_of(work := workload(tmp_path, rewards=reward), passes_of(work, Journal(tmp_path / "j", 0, "a"))[1])
    asked = file.read_text()
    work = workload(tmp_path, rewards=reward)
    engine, passes = passes_of(work, Journal(tmp_path / "j", 0, "a"))
    engine.load_weights({name: weight * 2 for name, weight in engine.weights().items()})  # would answer otherwise
    again = made_of(work, passes)
    ids = [[each["ids"].tolist() for group in groups for each in group] for groups in (first, again)]
    assert ids[0] == ids[1]
    assert file.read_text() == asked
    made_of(work, passes_of(work, Journal(tmp_path / "j", 0, "other settings"))[1])
    assert len(file.read_text()) > len(asked)


def test_a_reward_that_failed_is_asked_for_again_and_the_others_are_not(tmp_path: Path) -> None:
    file = tmp_path / "asked.txt"
    rewards = [LETTERS, {"use": "tests.rewards.scores:flaky", "options": {"file": str(file)}}]
    work = workload(tmp_path, rewards=rewards)
    with pytest.raises(RunError, match="the reward flaky failed for all 6 answers: OSError: the service is down"):
        made_of(work, passes_of(work, Journal(tmp_path / "j", 0, "a"))[1])
    file.touch()
    work = workload(tmp_path, rewards=rewards)
    found = made_of(work, passes_of(work, Journal(tmp_path / "j", 0, "a"))[1])
    assert not [each["failures"] for group in found for each in group if each["failures"]]
    assert len(file.read_text().splitlines()) == 6
    made_of(work, passes_of(work, Journal(tmp_path / "j", 0, "a"))[1])
    assert len(file.read_text().splitlines()) == 6


class _OfOtherRanks(Passes):
    """Passes of a rank beside another one."""

    other: Any

    def of_data_ranks(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_a_reward_that_fails_on_one_rank_alone_does_not_end_the_run(tmp_path: Path) -> None:
    work = workload(tmp_path, rewards=[{"use": "regex", "options": {"pattern": "("}}])
    passes = _OfOtherRanks(tiny_engine(work), work, Communicator(), 4)
    passes.other = [_Failures(3, 2, "why")]
    made_of(work, passes)
    passes.other = [_Failures(3, 3, "why")]
    with pytest.raises(RunError, match="the reward regex failed for all 9 answers"):
        made_of(work, passes)


def test_the_models_cache_is_tried_once_in_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    agree = local_forward._agree
    monkeypatch.setattr(local_forward, "_agree", lambda *given: tried.append(1) or agree(*given))
    work = workload(tmp_path, rewards=LETTERS)
    engine, passes = passes_of(work)
    made_of(work, passes)
    made_of(work, passes)
    evaluate(run_config(), work, engine)
    assert tried == [1]


def test_in_a_mixture_each_answer_is_rewarded_once_an_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "asked.txt"
    sets = [{"path": write_lines(tmp_path / f"{name}.jsonl", ROWS[:4])} for name in ("one", "two")]
    reward = {"use": "tests.rewards.scores:counted", "options": {"file": str(file)}}
    data = {"train": [{**each, "weight": 1} for each in sets], "evaluation": sets, "evaluation_fraction": 0}
    work = workload(tmp_path, rewards=reward, data=data)
    engine, _ = passes_of(work)
    run, events, progress = run_config(), list[Any](), Progress()
    values = Evaluations(run, work, engine, work.order(2, 0, by_epochs=False), progress, events.append)()
    assert len(file.read_text().splitlines()) == 8
    assert [*progress.by_set] == ["one.jsonl", "two.jsonl"]
    parts = [each["reward"] for each in progress.by_set.values()]
    assert values["reward"] == pytest.approx(sum(parts) / 2)
    assert [*progress.by_set.values()] == [evaluate(run, work, engine, part) for part in work.evaluation_parts.values()]


def reward_folder(folder: Path, work: PolicyWorkload, labels: int = 1) -> Path:
    torch.manual_seed(5)
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = LlamaConfig(**fields, vocab_size=260, num_labels=labels, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    work.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("packing", [True, False])
def test_a_reward_model_scores_each_answer_as_transformers_does(tmp_path: Path, packing: bool) -> None:
    folder = reward_folder(tmp_path / "reward", workload(tmp_path))
    rewards = [{"model": str(folder), "weight": 2.0}, LETTERS]
    work = workload(tmp_path, rewards=rewards, mask_truncated=True, data={"packing": packing})
    _, passes = passes_of(work)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for sample in (sample for group in made_of(work, passes) for sample in group):
        with torch.no_grad():
            score = plain(input_ids=sample["ids"].long()[None]).logits.item()
        assert sample["values"]["reward"] == pytest.approx(score, rel=1e-4, abs=1e-5)
        assert sample["reward"] == pytest.approx(2 * score + sample["values"]["letters"], rel=1e-4, abs=1e-5)


def test_what_is_no_reward_model_of_the_same_tokens_is_refused(tmp_path: Path) -> None:
    work = workload(tmp_path)
    folder = reward_folder(tmp_path / "reward", work)
    work.tokenizer.add_tokens(["<more>"])
    work.tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="has other tokens"):
        workload(tmp_path, rewards=[{"model": str(folder)}])
    other = workload(tmp_path)
    with pytest.raises(UserError, match="is no reward model"):
        passes_of(workload(tmp_path, rewards=[{"model": str(reward_folder(tmp_path / "classes", other, labels=3))}]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_language_model_as_a_reward_model_is_refused_for_its_missing_head_and_with_its_stage(
    tmp_path: Path, device: str
) -> None:
    """A check builds models on PyTorch's meta device, a training with their weights."""
    folder = tmp_path / "sft" / "checkpoints" / "step-00000002"
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(LlamaConfig(**fields, vocab_size=260)).save_pretrained(folder)
    workload(tmp_path).tokenizer.save_pretrained(folder)

    def why() -> str:
        work = workload(tmp_path, rewards=[{"model": str(folder)}])
        build = work.auxiliary["reward_sft"].build
        assert build is not None
        with pytest.raises(UserError) as refused, torch.device(device):
            build()
        assert refused.value.problems[0].fix == "train one with stage: reward, and give its folder"
        return refused.value.problems[0].why

    assert why() == f"{folder} is no reward model: it has no score head"
    (tmp_path / "sft" / "run.yaml").write_text("workload: {stage: sft}")
    assert why() == f"{folder} is no reward model: it has no score head (it was trained with stage sft)"


def test_an_evaluation_answers_each_prompt_once_with_the_likeliest_tokens(tmp_path: Path) -> None:
    work = workload(tmp_path, rewards=[LETTERS, "exact_match"])
    engine, passes = passes_of(work)
    assert work.evaluation is not None
    prompts = [work._prompt(work.evaluation.load(number, 0)) for number in range(len(work.evaluation))]
    answers = [work.decoded(drawn.tokens) for drawn in passes.answers(prompts, range(len(prompts)))]
    letters = [sum(letter.isascii() and letter.isalpha() for letter in text) for text in answers]
    values = evaluate(run_config(), work, engine)
    assert len(letters) == 3
    assert values["reward_letters"] == pytest.approx(sum(letters) / 3)
    assert values["reward_exact_match"] == 0
    assert values["loss"] == -values["reward"] == -values["reward_letters"]


def test_an_evaluation_without_any_reward_has_no_such_metric_and_warns_of_the_reasons(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = {"use": "tests.rewards.scores:failing_at", "options": {"file": str(tmp_path / "asked")}}
    work = workload(tmp_path, rewards=[{"use": "tests.rewards.scores:never"}, failing])
    engine, _ = passes_of(work)
    run, events, progress = run_config(), list[Any](), Progress()
    evaluations = Evaluations(run, work, engine, work.order(2, 0, by_epochs=False), progress, events.append)
    values = evaluations()
    assert sorted(values) == ["answer_tokens", "truncated"]
    [warning] = [each.message for each in events]
    assert warning.startswith(
        "no answer of the evaluation has a reward (never returned None for 3 of 3 answers; "
        "failing_at failed for 1 of 3 answers: ValueError: the first ("
    )
    evaluate(run, work, engine)
    assert "never returned None for 3 of 3 answers; failing_at returned None for 3 of 3" in caplog.text
    evaluations()
    evaluations()
    assert len(events) == 2, "the same warning is given once"


def test_a_plan_measures_memory_with_the_longest_answers_allowed(tmp_path: Path) -> None:
    work = workload(tmp_path, updates=2)
    order = GlobalOrder(len(work.train), 4, seed=1)
    window = stand_in_window(work, order, Slice(0, 1, 3))
    assert len(window.indices) == 4 * 3 // 2
    assert window.largest == 3
    counts = [work.count(each.tensors) for each in window.micro_batches]
    assert counts == [3 * LONGEST, 3 * LONGEST]
