"""Settings of learning from rewards: what goes together, and what is refused and why."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from drivetrain.config import rules
from drivetrain.config.engines import MeshEngine
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.reinforcement import LOSSES, STAGES, LossName, Reward
from drivetrain.config.resolve import resolved
from drivetrain.config.run import RunConfig
from drivetrain.trust.named_code import named_code

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))


def built(folder: Path, stage: str = "grpo", rewards: Any = "exact_match", **given: Any) -> RunConfig:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    adapter = {"adapter": given.pop("adapter")} if "adapter" in given else {}
    workload = {"type": "language_model", "stage": stage, "model": {"path": str(folder)}}
    workload["data"] = {"train": "owner/prompts", "template": "chatml", **given.pop("data", {})}
    workload["reinforcement"] = {"rewards": rewards, **given}
    found, problems = validate({"workload": workload, "batch_size": 8, "loop": {"steps": 10}, **adapter}, [])
    assert found is not None, problems
    return resolved(found, CPU)


def said(run: RunConfig) -> str:
    return "\n".join(map(str, rules.check(run, CPU)))


def test_a_micro_batch_is_all_answers_of_an_update_unless_it_is_given(tmp_path: Path) -> None:
    for stage, learning, given, expected in (
        ("grpo", {"answers": 6}, {}, 48),
        ("grpo", {"answers": 6, "updates": 5}, {}, 10),
        ("ppo", {"updates": 2}, {}, 4),
        ("grpo", {"answers": 6}, {"micro_batch_size": 3}, 3),
    ):
        run = built(tmp_path, stage, **learning).model_copy(update=given)
        assert run.global_batch == 8
        assert run.micro_batch == expected, (stage, learning, given)


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("runs/helpful", "helpful"),
        ("runs/helpful/last", "helpful"),
        ("runs/helpful/best/", "helpful"),
        ("runs/helpful/checkpoints/step-00000020", "helpful"),
        ("/data/runs/helpful/export", "helpful"),
        ("C:\\runs\\helpful\\last", "helpful"),
        ("trl/helpful/checkpoint-500", "helpful"),
        ("owner/Helpful-1B", "Helpful-1B"),
        ("last", "last"),
        ("../best", "best"),
    ],
)
def test_a_reward_model_is_called_after_the_run_that_its_folder_lies_in(model: str, label: str) -> None:
    assert Reward(model=model).label == label
    assert Reward(model=model, name="mine").label == "mine"


def test_reward_models_of_two_runs_differ_in_their_names_and_two_of_one_run_are_refused(tmp_path: Path) -> None:
    first, second = {"model": "runs/a/last"}, {"model": "runs/b/last"}
    assert "two rewards are called" not in said(built(tmp_path, rewards=[first, second]))
    assert "two rewards are called a" in said(built(tmp_path, rewards=[first, {"model": "runs/a/best"}]))
    assert "two rewards" not in said(built(tmp_path, rewards=[first, {"model": "runs/a/best", "name": "best"}]))


def test_the_checkpoint_that_a_runs_folder_stands_for_keeps_the_runs_name(tmp_path: Path) -> None:
    checkpoint = tmp_path / "helpful/checkpoints/step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (tmp_path / "helpful/run.yaml").write_text("{}")
    (tmp_path / "helpful/best").symlink_to("checkpoints/step-00000002")
    run: Any = built(tmp_path, rewards=[{"model": str(tmp_path / "helpful")}])
    (reward,) = run.workload.reinforcement.rewards
    assert reward.model == str(checkpoint)
    assert reward.label == "helpful"


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_accepted_at_its_stage_without_further_settings(tmp_path: Path, name: str) -> None:
    assert said(built(tmp_path, LOSSES[name].stages[0], loss=name)) == ""
    assert set(get_args(LossName)) == LOSSES.keys()


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_has_a_usual_loss(tmp_path: Path, stage: str) -> None:
    run: Any = built(tmp_path, stage)
    assert said(run) == ""
    assert run.workload.reinforcement.loss_of(stage) == stage


@pytest.mark.parametrize(
    ("beta", "adapter", "reference"),
    [(0.0, None, "none"), (0.1, None, "copy"), (0.1, {"method": "lora"}, "adapters_off")],
)
def test_the_reference_is_chosen_by_what_needs_one(
    tmp_path: Path, beta: float, adapter: dict[str, Any] | None, reference: str
) -> None:
    run: Any = built(tmp_path, beta=beta, adapter=adapter)
    assert run.workload.reinforcement.reference == reference


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rewards": []}, "answers need a reward, and none is given"),
        ({"rewards": "exact"}, "'exact' is no reward that ships, and no import path"),
        ({"rewards": ["math", "math"]}, "two rewards are called math"),
        ({"rewards": "code"}, "the reward code runs Python that the model writes"),
        ({"allow_code": True}, "no reward runs code"),
        ({"loss": "rloo"}, "rloo is a loss of stage rloo"),
        ({"loss": "cispo", "clip": 0.1}, "the loss cispo has none"),
        ({"loss": "luspo", "importance": "token"}, "the ratio of luspo is of each sequence"),
        ({"temperatures": [1.0, 2.0]}, "the loss grpo has none"),
        ({"reference": "copy"}, "beta is 0: nothing is compared with it"),
        ({"beta": 0.1, "reference": "none"}, "beta weighs the divergence from it"),
        ({"beta": 0.1, "reference": "adapters_off"}, "there are no adapters to put off"),
        ({"data": {"stream": True}}, "stage grpo reads its data whole"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_reason(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    assert why in said(built(tmp_path, **given))


def test_a_misspelt_reward_that_ships_is_suggested_before_all_of_them_are_listed(tmp_path: Path) -> None:
    assert "did you mean exact_match? Else give one of exact_match, regex," in said(
        built(tmp_path, rewards="exactmatch")
    )
    assert "did you mean" not in said(built(tmp_path, rewards="helpfulness"))


def test_the_reward_math_is_refused_with_its_extra_where_its_package_is_missing(tmp_path: Path) -> None:
    run = built(tmp_path, rewards=["exact_match", "math"])
    [found] = rules.check(run, replace(CPU, packages=frozenset()))
    assert found.field == "workload.reinforcement.rewards.1.use"
    assert found.why == "the reward math needs math_verify, which is not installed"
    assert found.fix == "pip install 'drivetrain[rewards]'"
    assert rules.check(run, replace(CPU, packages=frozenset({"math_verify"}))) == []
    assert rules.check(built(tmp_path), replace(CPU, packages=frozenset())) == []


def test_ppo_has_one_answer_and_no_scale_and_needs_a_whole_head(tmp_path: Path) -> None:
    run: Any = built(tmp_path, "ppo")
    assert run.workload.reinforcement.answers_of("ppo") == 1
    assert "ppo's advantages are whitened" in said(built(tmp_path, "ppo", scale="batch"))
    assert "one answer has no others" in said(built(tmp_path, answers=1))
    assert "the loss grpo has none" in said(built(tmp_path, gae_lambda=0.9))
    split: Any = run.model_copy(update={"engine": MeshEngine(tp=2)})
    assert "hidden states that no rank has as a whole" in said(split)


def test_other_stages_refuse_settings_of_rewards(tmp_path: Path) -> None:
    assert "only stages that learn from rewards read it, and workload.stage is sft" in said(built(tmp_path, "sft"))


def test_a_function_of_the_users_own_is_code_that_the_run_names(tmp_path: Path) -> None:
    run = built(tmp_path, rewards=["math", {"use": "scores:brevity"}])
    [(field, name)] = [(each.field, each.name) for each in named_code(run)]
    assert (field, name) == ("workload.reinforcement.rewards.1.use", "scores:brevity")


def test_what_the_model_writes_is_code_that_the_run_names(tmp_path: Path) -> None:
    run = built(tmp_path, rewards="code", allow_code=True)
    [(field, name)] = [(each.field, each.name) for each in named_code(run)]
    assert (field, name) == ("workload.reinforcement.allow_code", "what its model writes")


def test_a_function_itself_is_refused_with_its_name_and_nothing_else(tmp_path: Path) -> None:
    raw = built(tmp_path).model_dump(mode="json")
    for given in ([said], said, [{"use": said}]):
        raw["workload"]["reinforcement"]["rewards"] = given
        run, problems = validate(copy.deepcopy(raw), [])
        assert run is not None
        _, [problem] = rules.judged(run, problems, CPU)
        assert problem.field.startswith("workload.reinforcement.rewards")
        assert "runs in processes of its own, which import it" in problem.why
        assert problem.fix == "write it as module:function, 'tests.config.test_reinforcement:said'"
