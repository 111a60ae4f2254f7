"""Large requests and answers: what they are read, tokenised and written by lets others be answered meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.inference.encoders import ENCODER, TextEncoder, load_reader
from drivetrain.inference.serve import reading
from drivetrain.inference.serve.app import Guards
from drivetrain.inference.serve.metrics import Metrics
from drivetrain.inference.serve.reading import ServedReader
from drivetrain.inference.serve.reading_app import reading_application
from drivetrain.web import json_bodies
from drivetrain.web.json_bodies import written_json
from drivetrain.web.keys import Keys
from drivetrain.web.limits import Places
from tests.running_server import Running, running, serving

TEXT = "/v1/completions"
LONG = {"prompt": "a", "user": "x" * 300_000}


def held_until_another_is_answered(server: Running, work: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
    """Returns work that begins once another client of the server was answered."""

    def held(*given: Any) -> Any:
        if not found:
            found.append(0)  # the other client's own request is not held
            found.append(server.ask("/health")[0])
            found.append(server.ask(TEXT, {"prompt": "b"})[0])
        return work(*given)

    return held


def test_others_are_answered_while_a_large_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        found: list[int] = []
        held = held_until_another_is_answered(server, json_bodies.read_json, found)
        monkeypatch.setattr(json_bodies, "read_json", held)
        assert server.ask(TEXT, LONG)[0] == 200
    assert found == [0, 200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_others_are_answered_while_a_large_answer_is_written(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        found: list[int] = []
        held = held_until_another_is_answered(server, written_json, found)
        for module in ("app", "completions"):
            monkeypatch.setattr(f"drivetrain.inference.serve.{module}.written_json", held)
        body = {"prompt": [65] * 3000, "echo": True, "logprobs": 2, "max_tokens": 2, "stream": stream}
        assert server.ask(TEXT, body)[0] == 200
    assert found == [0, 200, 200]


def test_json_written_beside_the_loop_reads_as_it_was() -> None:
    content = {
        "data": [{"index": 0, "embedding": [0.1, -1e-9, 3]}],
        "text": '房间 \u2028\n"',
        "none": None,
        "yes": True,
    }
    assert json.loads(written_json(content)) == content
    assert b"\n" not in written_json(content)
    with pytest.raises(ValueError, match="not JSON compliant"):
        written_json([float("nan")])


class Counting:
    """A tokenizer that notes the characters of each turn, and takes a while for it."""

    def __init__(self, inner: Any, begun: threading.Event) -> None:
        self._inner, self._begun, self.turns = inner, begun, list[int]()

    def __call__(self, texts: list[str], *given: Any, **named: Any) -> Any:
        self.turns.append(sum(map(len, texts)))
        if len(texts) > 1:
            self._begun.set()
            threading.Event().wait(0.02)
        return self._inner(texts, *given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def encoder(folder: Path) -> TextEncoder:
    tokenizer = byte_tokenizer(["<pad>"])
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=32, max_position_embeddings=64, **sizes)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = load_reader(folder, ENCODER)
    assert isinstance(found, TextEncoder)
    return found


def test_a_small_request_takes_its_turn_while_many_texts_are_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    model = encoder(tmp_path)
    tokenizer = Counting(model.tokenizer, begun)
    monkeypatch.setattr(reading, "CHARACTERS_AT_ONCE", 1000)
    texts = [f"{number:04d}" * 10 for number in range(1000)]
    places = Places(4)
    served = ServedReader(replace(model, tokenizer=tokenizer), places, Metrics(places))
    with running(reading_application(served, Guards(Keys([])))) as server:
        whole: list[Any] = []
        large = threading.Thread(target=lambda: whole.append(server.ask("/v1/embeddings", {"input": texts})))
        large.start()
        assert begun.wait(20)
        assert server.ask("/v1/embeddings", {"input": "one"})[0] == 200
        before = len([size for size in tokenizer.turns if size > 40])
        large.join()
        alone = server.ask("/v1/embeddings", {"input": texts[777]})[2]["data"][0]["embedding"]
    served.close()
    assert before < 30
    assert tokenizer.turns.count(1000) == 40
    assert [each["index"] for each in whole[0][2]["data"]] == list(range(1000))
    assert whole[0][2]["data"][777]["embedding"] == pytest.approx(alone, abs=1e-6)


def test_an_object_of_too_many_keys_is_refused_by_their_number() -> None:
    with serving() as server:
        body = {"prompt": "a", "metadata": {f"key {number}": 0 for number in range(10_001)}}
        status, _, found = server.ask(TEXT, body)
        assert (status, found["error"]["code"]) == (400, "json_too_large")
        assert "10,001 keys" in found["error"]["message"]
        del body["metadata"]["key 0"]  # type: ignore[attr-defined]
        assert server.ask(TEXT, body)[0] == 200
