"""Answers that are learned from, drawn by a server in the model's place: a stand-in that speaks vLLM's HTTP."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.checkpoint.directory import load, newest_good
from drivetrain.checkpoint.state import same
from drivetrain.config.rollout_server import RolloutServer
from drivetrain.errors import RunError, UserError
from drivetrain.generation.server_client import ServerClient
from drivetrain.tracking.jsonl import read_events
from tests.generation.vllm_stand_in import StandIn, serving
from tests.tiny_language import LLAMA, workload, write_lines
from tests.tiny_language import ROWS as TALKS
from tests.workloads.policy_cases import ROWS
from tests.workloads.test_distillation import teacher_in

Command = Callable[..., tuple[int, str, str]]
MODEL = {**LLAMA, "vocab_size": 260}
ANSWERS = 2 * 3  # of a batch
FIELD = "workload.reinforcement.server"


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{k: v for k, v in MODEL.items() if k != "model_type"})).eval()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with serving(StandIn(model)) as found:
        yield found


def run_file(folder: Path, server: StandIn, **given: Any) -> Path:
    write_lines(folder / "rows.jsonl", ROWS)
    learning = {
        "rewards": {"use": "length", "options": {"most": 5, "over": 4}},
        "answers": 3,
        "max_new_tokens": 5,
        "updates": 2,  # so that log-probabilities of all answers are computed, and compared with the server's
        "server": {
            "url": server.url,
            "weights": str(folder / "weights"),
            "time_limit": 2,
            **given.pop("of_server", {}),
        },
        **given.pop("reinforcement", {}),
    }
    run = {
        "workload": {
            "type": "language_model",
            "stage": "grpo",
            "model": {"config": MODEL},
            "data": {"train": str(folder / "rows.jsonl"), "template": "plain", "length": 24, "evaluation_fraction": 0},
            "reinforcement": learning,
        },
        "batch_size": 2,
        "loop": {"steps": 4},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "checkpoints": {"every_steps": 2},
        "output": str(folder / "run"),
        **given,
    }
    (folder / "run.json").write_text(json.dumps(run))
    return folder / "run.json"


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [each for each in read_events(folder / "run" / "events.jsonl") if each["event"] == kind]


def paths(server: StandIn) -> list[str]:
    return [path for path, _ in server.asked]


def test_each_batch_is_answered_with_the_weights_of_its_step(
    drivetrain: Command, tmp_path: Path, server: StandIn
) -> None:
    code, _, err = drivetrain("train", str(run_file(tmp_path, server)), "--quiet")
    assert code == 0, err
    made = [each["metrics"] for each in events(tmp_path, "rollout")]
    assert len(made) == 2
    assert all(each["largest_mismatch"] < 1e-4 for each in made), "the server has the trainer's own weights each time"
    pushed = ["/update_weight_version", "/collective_rpc", "/reset_prefix_cache"]
    assert paths(server) == 2 * [*pushed, *ANSWERS * ["/v1/completions"]]
    assert all(each["push_seconds"] > 0 and each["answer_seconds"] > 0 for each in made)
    seeds = [body["seed"] for path, body in server.asked if path == "/v1/completions"]
    assert len(set(seeds)) == len(seeds)
    assert not list((tmp_path / "weights").iterdir()), "weights are gone once they are loaded"


def test_with_stale_weights_the_mismatch_shows(drivetrain: Command, tmp_path: Path, server: StandIn) -> None:
    server._load = lambda _: {"results": [None]}  # type: ignore[method-assign]  # keeps its own
    code, _, err = drivetrain("train", str(run_file(tmp_path, server)), "--quiet")
    assert code == 0, err
    assert all(each["metrics"]["mismatch"] > 1e-3 for each in events(tmp_path, "rollout"))


def test_a_run_goes_on_with_the_answers_that_came_before_the_server_failed(
    drivetrain: Command, tmp_path: Path, server: StandIn
) -> None:
    path = run_file(tmp_path, server, of_server={"time_limit": 0.6, "at_once": 1})
    server.fails = lambda number: 503 if number > ANSWERS + 4 else None  # in the second batch
    code, _, err = drivetrain("train", str(path), "--quiet")
    assert code == 1
    assert "status 503" in err
    assert "--resume" in err
    server.fails, before = lambda _: None, server.answered
    code, _, err = drivetrain("train", str(path), "--quiet", "--resume")
    assert code == 0, err
    assert (before, server.answered) == (ANSWERS + 4, 2 * ANSWERS)
    [warned] = [each["message"] for each in events(tmp_path, "warning") if "asked for again" in each["message"]]
    assert warned.startswith("step 2: 2 answers were asked for again after the run was resumed")


def test_a_server_that_is_busy_for_a_while_is_asked_again(drivetrain: Command, tmp_path: Path, server: StandIn) -> None:
    server.fails = lambda number: 503 if number == 2 else None
    code, _, err = drivetrain("train", str(run_file(tmp_path, server)), "--quiet", "loop.steps=2")
    assert code == 0, err
    assert server.answered == ANSWERS


def test_an_adapter_is_loaded_in_place_of_the_one_before(drivetrain: Command, tmp_path: Path, server: StandIn) -> None:
    base = model()
    base.save_pretrained(tmp_path / "base")
    server.lora = True
    server.make = lambda: type(base).from_pretrained(tmp_path / "base").eval()
    path = run_file(tmp_path, server, adapter={"method": "lora", "rank": 2})
    of_base = f"workload.model={{path: {tmp_path / 'base'}, tokenizer: bytes}}"
    code, _, err = drivetrain("train", str(path), "--quiet", of_base)
    assert code == 0, err
    assert all(each["metrics"]["largest_mismatch"] < 1e-4 for each in events(tmp_path, "rollout"))
    assert paths(server).count("/v1/load_lora_adapter") == 2
    assert {body["model"] for path, body in server.asked if path == "/v1/completions"} == {"drivetrain"}


def at_answer(server: StandIn, number: int, happens: Callable[[], int | None]) -> None:
    """Lets something happen once, as the server is asked for an answer the given time. Its status is the server's."""
    left = [happens]
    server.fails = lambda asked: left.pop()() if asked == number and left else None


@pytest.mark.parametrize("adapter", [False, True])
def test_a_server_that_is_started_anew_in_a_batch_gets_the_weights_anew(
    drivetrain: Command, tmp_path: Path, server: StandIn, adapter: bool
) -> None:
    def start_anew(number: int) -> int | None:
        """Breaks both requests that are under way, as a server does that ends."""
        if number == ANSWERS + 3:
            server.start_anew()
        return 503 if ANSWERS + 3 <= number <= ANSWERS + 4 else None

    more: dict[str, Any] = {}
    if adapter:
        base = model()
        base.save_pretrained(tmp_path / "base")
        server.lora, server.make = True, lambda: type(base).from_pretrained(tmp_path / "base").eval()
        more = {"adapter": {"method": "lora", "rank": 2}}
    path = run_file(tmp_path, server, of_server={"at_once": 2}, **more)
    server.fails = start_anew
    words = [f"workload.model={{path: {tmp_path / 'base'}, tokenizer: bytes}}"] if adapter else []
    code, _, err = drivetrain("train", str(path), "--quiet", *words)
    assert code == 0, err
    assert all(each["metrics"]["largest_mismatch"] < 1e-4 for each in events(tmp_path, "rollout"))
    assert paths(server).count("/update_weight_version") == 3, "of two batches, and once more"
    assert len({body["seed"] for path, body in server.asked if path == "/v1/completions"}) == 2 * ANSWERS


def test_a_server_that_is_started_anew_after_it_loaded_loads_again(
    drivetrain: Command, tmp_path: Path, server: StandIn
) -> None:
    left, load_own = [server.start_anew], server._load

    def forgets_once(folder: Path) -> Any:
        found = load_own(folder)
        if left:
            left.pop()()
        return found

    server._load = forgets_once  # type: ignore[method-assign]
    code, _, err = drivetrain("train", str(run_file(tmp_path, server)), "--quiet", "loop.steps=2")
    assert code == 0, err
    assert paths(server).count("/collective_rpc") == 2
    assert all(each["metrics"]["largest_mismatch"] < 1e-4 for each in events(tmp_path, "rollout"))


def test_a_server_that_gets_other_weights_meanwhile_ends_the_run(
    drivetrain: Command, tmp_path: Path, server: StandIn
) -> None:
    at_answer(server, ANSWERS, lambda: setattr(server, "label", "of another run"))
    code, _, err = drivetrain("train", str(run_file(tmp_path, server)), "--quiet")
    assert code == 1
    assert "was given other weights (of another run) while it answered" in " ".join(err.split())


@pytest.mark.parametrize(("at", "saved"), [(2, None), (ANSWERS + 2, 2)])
def test_a_signal_ends_the_wait_for_a_server_and_the_run_saves(
    drivetrain: Command, tmp_path: Path, server: StandIn, at: int, saved: int | None
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    assert drivetrain("train", str(run_file(whole, server)), "--quiet")[0] == 0
    path = run_file(stopped, server, of_server={"time_limit": 100, "at_once": 1}, checkpoints={"every_steps": 4})
    server.requests, server.answered = 0, 0

    def stop() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 503  # the server does not answer either

    at_answer(server, at, stop)
    start = time.monotonic()
    code, _, err = drivetrain("train", str(path), "--quiet")
    assert (code, time.monotonic() - start < 30) == (143, True), err
    report = json.loads((stopped / "run" / "report.json").read_text())
    assert (report["status"], report["steps"]) == ("interrupted", saved or 0)
    folders = sorted((stopped / "run" / "checkpoints").glob("step-*")) if saved else []
    assert [each.name for each in folders] == ([f"step-{saved:08d}"] if saved else [])
    server.fails = lambda _: None
    code, _, err = drivetrain("train", str(path), "--quiet", "--resume")
    assert code == 0, err
    assert server.answered == 2 * ANSWERS, "what came before the signal was kept"
    states = [load(newest_good(each / "run" / "checkpoints")[0] or each) for each in (whole, stopped)]
    assert same(states[0]["model"], states[1]["model"]), "the stand-in draws alike when it is asked again"


def test_answers_are_found_again_where_the_server_has_moved(
    drivetrain: Command, tmp_path: Path, server: StandIn
) -> None:
    path = run_file(tmp_path, server, of_server={"time_limit": 0.6, "at_once": 1})
    server.fails = lambda number: 503 if number > 4 else None
    assert drivetrain("train", str(path), "--quiet")[0] == 1
    with serving(StandIn(model)) as other:
        url = f"workload.reinforcement.server.url={other.url}"
        code, _, err = drivetrain("train", str(path), "--quiet", "--resume", url)
        assert code == 0, err
        assert other.answered == 2 * ANSWERS - 4


def test_weights_go_in_the_dtype_that_the_server_has(drivetrain: Command, tmp_path: Path, server: StandIn) -> None:
    server.dtype, load_own, dtypes = "torch.bfloat16", server._load, set()

    def looked_at(folder: Path) -> Any:
        dtypes.update(tensor.dtype for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
        return load_own(folder)

    server._load = looked_at  # type: ignore[method-assign]
    code, _, err = drivetrain("train", str(run_file(tmp_path, server)), "--quiet", "loop.steps=2")
    assert code == 0, err
    assert dtypes == {torch.bfloat16}
    [made] = events(tmp_path, "rollout")
    assert 1e-6 < made["metrics"]["mismatch"] < 0.05


# --- replies of a model that is distilled -----------------------------------------------------------------------------


def distilled(folder: Path, **given: Any) -> Path:
    teacher = teacher_in(folder)
    block = {"type": "language_model", "stage": "distill", "model": {"config": LLAMA}}
    data = {"train": write_lines(folder / "talks.jsonl", TALKS), "template": "chatml", "length": 64}
    learning = {"teacher": str(teacher), "own_answers": 1.0, "max_new_tokens": 8, **given}
    run = {
        "workload": {**block, "data": {**data, "evaluation_fraction": 0}, "distillation": learning},
        "batch_size": 4,
        "loop": {"steps": 3},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "output": str(folder / "run"),
    }
    (folder / "run.json").write_text(json.dumps(run))
    return folder / "run.json"


def stand_in(folder: Path, **more: Any) -> StandIn:
    return StandIn(lambda: workload(folder, TALKS).build_model().eval(), **more)


def test_a_model_that_is_distilled_learns_from_replies_that_the_server_writes_with_its_weights(
    drivetrain: Command, tmp_path: Path
) -> None:
    """Each is the likeliest at a temperature near 0: what the run itself writes without a server."""
    path, written = distilled(tmp_path, drawing_temperature=1e-3), {}
    with serving(stand_in(tmp_path)) as server:
        for drawn, given in (("by a server", given_to(server)), ("by the run", [])):
            code, _, err = drivetrain("train", str(path), "--quiet", "--overwrite", *given)
            assert code == 0, err
            lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
            written[drawn] = sorted((each["step"], each["prompt"], each["answer"]) for each in map(json.loads, lines))
        assert server.answered == 3 * 4
        server.max_model_len = 16
        code, _, err = drivetrain("train", str(path), "--overwrite", *given_to(server))
    assert len(written["by a server"]) == 3 * 4
    assert written["by a server"] == written["by the run"]
    assert code == 2
    assert "workload.distillation.server" in err
    assert "it takes 16 tokens" in " ".join(err.split())


def test_no_more_of_a_reply_is_asked_for_than_is_read(drivetrain: Command, tmp_path: Path) -> None:
    """Replies end where the data's do, at `length` of 64: a server that takes 64 tokens is enough."""
    path = distilled(tmp_path, max_new_tokens=60)
    with serving(stand_in(tmp_path, max_model_len=64)) as server:
        code, _, err = drivetrain("train", str(path), "--quiet", *given_to(server))
        assert code == 0, err
        asked = [body for name, body in server.asked if name == "/v1/completions"]
    assert max(len(body["prompt"]) + body["max_tokens"] for body in asked) == 64


def test_replies_are_found_again_where_the_server_has_moved(drivetrain: Command, tmp_path: Path) -> None:
    path = distilled(tmp_path)
    patience = ["workload.distillation.server.time_limit=0.6", "workload.distillation.server.at_once=1"]
    with serving(stand_in(tmp_path)) as server:
        server.fails = lambda number: 503 if number > 6 else None
        code, _, _ = drivetrain("train", str(path), "--quiet", *given_to(server, ".url"), *patience)
        assert code == 1
    with serving(stand_in(tmp_path)) as other:
        code, _, err = drivetrain("train", str(path), "--quiet", "--resume", *given_to(other, ".url"), *patience)
        assert code == 0, err
        assert other.answered == 3 * 4 - 6


def given_to(server: StandIn, name: str = "") -> list[str]:
    return [f"workload.distillation.server{name}={server.url}"]


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(server: StandIn, temperature: float = 1.0, adapter: bool = False, **given: Any) -> str:
    client = ServerClient(RolloutServer(**{"url": server.url, "time_limit": 2, **given}), FIELD)
    with pytest.raises(UserError) as error:
        client.check(600, temperature, adapter)
    return str(error.value)


def test_all_that_a_server_lacks_is_named_at_once(server: StandIn) -> None:
    found = refused(server, temperature=0.7, adapter=True)
    assert "takes 512 tokens, and a prompt with its answer has up to 600" in found
    assert "--logprobs-mode processed_logprobs" in found
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in found


def test_a_server_that_cannot_change_its_weights_is_refused(server: StandIn) -> None:
    server.development, server.max_model_len = False, 600
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve" in refused(server)


def test_an_address_at_which_nothing_answers_is_refused_with_the_command(server: StandIn) -> None:
    assert "start it: VLLM_SERVER_DEV_MODE=1" in refused(server, url="http://127.0.0.1:1")


def test_a_key_is_sent_from_its_variable(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key, server.max_model_len = "secret", 600
    assert "status 401" in refused(server)
    assert "the variable ROLLOUT_KEY is not set" in refused(server, key="ROLLOUT_KEY")
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    ServerClient(RolloutServer(url=server.url, key="ROLLOUT_KEY", time_limit=2), FIELD).check(600, 1.0, False)


def test_a_folder_that_the_server_does_not_see_ends_the_run_at_once(
    drivetrain: Command, tmp_path: Path, server: StandIn
) -> None:
    server._load = lambda _: 500  # type: ignore[method-assign]
    code, _, err = drivetrain("train", str(run_file(tmp_path, server)), "--quiet")
    assert code == 1
    assert f"to load the weights in {tmp_path / 'weights'}" in " ".join(err.split())
    assert paths(server).count("/collective_rpc") == 1


@pytest.mark.parametrize(
    "found",
    [
        {"choices": []},
        {"choices": [{"token_ids": None, "logprobs": None}]},
        {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}]},
        {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [float("nan")]}}]},
        {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0] * 2}, "finish_reason": "abort"}]},
        {"choices": [{"token_ids": [1] * 9, "logprobs": {"token_logprobs": [-1.0] * 9}}]},
    ],
)
def test_an_answer_that_lacks_what_is_learned_from_is_an_error(server: StandIn, found: Any) -> None:
    server._answer = lambda _: found  # type: ignore[method-assign]
    client = ServerClient(RolloutServer(url=server.url, time_limit=2), FIELD)
    with pytest.raises(RunError, match=r"answered with|cut an answer off after 2 of 8 tokens"):
        client.drawn((1, 2), 8, 1.0, 0, frozenset())


def test_it_draws_from_the_models_own_distribution(server: StandIn) -> None:
    """The stand-in is a server as vLLM is: what it says of an answer is plain Transformers'."""
    server.logprobs_mode = "processed_logprobs"
    client = ServerClient(RolloutServer(url=server.url, time_limit=2), FIELD)
    drawn = client.drawn((5, 6, 7), 4, 0.5, 3, frozenset({256}))
    logits = server.model(input_ids=torch.tensor([[5, 6, 7, *drawn.tokens]])).logits[0, 2:-1] / 0.5
    expected = logits.log_softmax(1)[torch.arange(len(drawn.tokens)), drawn.tokens]
    torch.testing.assert_close(torch.tensor(drawn.logprobs), expected.float(), rtol=1e-4, atol=1e-5)
