"""The server, asked by clients of others: LangChain and lm-evaluation-harness. The latter is no dependency: its test
skips where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain.compare.choice_evaluations import choice_evaluations
from drivetrain.data.language.choice_sets import read_subjects
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.inference.loading import load_model
from tests.choice_files import harness_task, mmlu
from tests.running_server import Running, serving

WITHOUT = "is not installed: pip install"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of random weights, wide enough apart that it answers with all letters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenizer = byte_tokenizer(["<|end|>"])
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=1200, initializer_range=0.4, eos_token_id=256, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with serving(load_model(folder)) as found:  # type: ignore[arg-type]
        yield found


def test_lm_evaluation_harness_finds_through_the_server_what_multiple_choice_finds(
    server: Running, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason=f"lm-evaluation-harness {WITHOUT} 'lm_eval[api]'")
    pytest.importorskip("tenacity", reason=f"what its client of APIs needs {WITHOUT} 'lm_eval[api]'")
    task_manager = pytest.importorskip("lm_eval.tasks").TaskManager
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    questions = mmlu(tmp_path / "files", ["law"])
    (subject,) = read_subjects(questions, [], shots=1)
    task = harness_task(tmp_path / "tasks", "mmlu", subject)
    told = lm_eval.simple_evaluate(
        "local-completions",
        model_args={
            "model": "model",
            "base_url": f"{server.url}/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(folder),
            "num_concurrent": 1,
            "max_retries": 1,
        },
        tasks=[task],
        num_fewshot=1,
        batch_size=4,
        task_manager=task_manager(include_path=str(tmp_path / "tasks"), include_defaults=False),
    )["results"][task]
    (found, _) = choice_evaluations([("model", folder, "best")], questions, 1, [], False, lambda _: None)
    assert told["acc,none"] == pytest.approx(found.metrics["accuracy"], abs=1e-9)
    assert told["acc_stderr,none"] == pytest.approx(found.standard_errors["accuracy"], rel=1e-6)


def test_langchain_chats_and_streams() -> None:
    langchain = pytest.importorskip("langchain_openai", reason=f"LangChain's client {WITHOUT} langchain-openai")
    with serving() as server:
        model = langchain.ChatOpenAI(model="scripted", base_url=server.url, api_key="none", seed=3, max_retries=0)
        reply = model.invoke([("system", "Be brief."), ("human", "Hello")])
        assert reply.content == "answer 3 0."
        assert reply.usage_metadata["output_tokens"] == len(reply.content)
        assert "".join(chunk.content for chunk in model.stream("Hello")) == "answer 3 0."
        assert model.batch(["Hello", "Hello"])[1].content == "answer 3 0."
        legacy = langchain.OpenAI(model="scripted", base_url=server.url, api_key="none", seed=3, max_retries=0)
        assert legacy.invoke("Hello").startswith("answer 3 0")
