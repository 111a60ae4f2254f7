"""Embeddings and classes, asked by OpenAI's own client and by plain HTTP, beside plain Transformers."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import UserError
from drivetrain.inference.encoders import (
    ENCODER,
    PICTURES,
    TEXTS,
    WRITER,
    Reader,
    TextEncoder,
    kind_of,
    load_reader,
)
from drivetrain.inference.serve.app import Guards
from drivetrain.inference.serve.metrics import Metrics
from drivetrain.inference.serve.reading import ServedReader
from drivetrain.inference.serve.reading_app import reading_application
from drivetrain.models.preprocessing import write_preprocessing
from drivetrain.web.keys import Keys
from drivetrain.web.limits import Places
from tests.kept_memory import kept_bytes
from tests.running_server import Running, running
from tests.small_tokenizers import made

TEXTS_ASKED = ["word7 good", "房间 word1 it's", "hôtel " * 9, "word2", "good word3 word4 word5"]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 40,
}  # fmt: skip


@contextmanager
def serving(
    model: Reader, keys: tuple[str, ...] = (), places: Places | None = None, seconds: float = 60
) -> Iterator[Running]:
    places = places or Places(64)
    served = ServedReader(model, places, Metrics(places), seconds)
    with running(reading_application(served, Guards(Keys(keys)))) as found:
        yield found
    served.close()


def bert(folder: Path, kind: Any, **given: Any) -> Path:
    tokenizer = made("bert")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SIZES, **given)
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    return bert(folder, BertForSequenceClassification, id2label={0: "bad", 1: "good", 2: "so"})


@pytest.fixture(scope="module")
def server(classifier: Path) -> Iterator[Running]:
    assert kind_of(classifier, "best", False) == TEXTS
    with serving(load_reader(classifier, TEXTS)) as found:
        yield found


def test_a_model_that_is_neither_here_nor_on_a_hub_is_refused() -> None:
    with pytest.raises(UserError, match="is no folder here, and"):
        kind_of(Path("nobody/nothing"), "best", False)


def plain_embeddings(folder: Path, texts: list[str]) -> torch.Tensor:
    """The mean of the last states over each text's tokens, one text at a time, of unit length."""
    model, tokenizer = BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        found = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_are_the_mean_of_what_transformers_computes(server: Running, classifier: Path, form: Any) -> None:
    found = server.client().embeddings.create(model=classifier.name, input=TEXTS_ASKED, encoding_format=form)
    assert [each.index for each in found.data] == list(range(5))
    rows = [each.embedding for each in found.data]
    if form == "base64":
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]  # type: ignore[arg-type,misc]
    numbers = torch.tensor(np.array(rows, dtype=np.float32))
    torch.testing.assert_close(numbers, plain_embeddings(classifier, TEXTS_ASKED), atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    assert found.usage.total_tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS_ASKED)


def test_token_ids_are_embedded_as_their_text(server: Running, classifier: Path) -> None:
    ids = AutoTokenizer.from_pretrained(classifier)(TEXTS_ASKED)["input_ids"]
    client = server.client()
    texts = client.embeddings.create(model=classifier.name, input=TEXTS_ASKED)
    tokens = client.embeddings.create(model=classifier.name, input=ids)
    one = client.embeddings.create(model=classifier.name, input=ids[1])
    for text, token in zip(texts.data, tokens.data, strict=True):
        assert text.embedding == token.embedding
    assert one.data[0].embedding == pytest.approx(texts.data[1].embedding, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "status", "told"),
    [
        ({"input": "word1 " * 60}, 400, "more than the model's 40 tokens"),
        ({"input": [[5] * 41]}, 400, "more than the model's 40 tokens"),
        ({"input": [5, 999_999]}, 400, "no token 999999"),
        ({"input": []}, 400, "at least 1"),
        ({"input": ["a"] * 2049}, 400, "at most 2048"),
        ({"input": "a", "dimensions": 8}, 400, "have 32 numbers"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "model": "other"}, 404, "no model 'other'"),
        ({"input": "a", "input_type": "query"}, 400, "input_type='query' is not supported"),
    ],
)
def test_what_cannot_be_embedded_is_refused(server: Running, given: dict[str, Any], status: int, told: str) -> None:
    code, _, found = server.ask("/v1/embeddings", given)
    assert (code, told in found["error"]["message"]) == (status, True), found


def test_classes_are_those_of_transformers(server: Running, classifier: Path) -> None:
    texts = [*TEXTS_ASKED, "word1 " * 60]
    found = server.ask("/v1/classify", {"input": texts})[2]
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    for row, text in zip(found["data"], texts, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=40)).logits[0]
        chances = logits.softmax(-1).tolist()
        assert row["label"] == model.config.id2label[int(logits.argmax())]
        assert list(row["probabilities"].values()) == pytest.approx(chances, abs=1e-5)
        assert list(row["probabilities"]) == ["bad", "good", "so"]
        assert (row["num_classes"], row["truncated"]) == (3, text == texts[-1])
    one = server.ask("/v1/classify", {"input": texts[0]})[2]
    assert one["data"][0]["probability"] == pytest.approx(found["data"][0]["probability"], abs=1e-5)


def test_its_paths_are_described_and_guarded(classifier: Path) -> None:
    with serving(load_reader(classifier, TEXTS), keys=("secret",)) as server:
        paths = server.ask("/openapi.json", authorization="Bearer secret")[2]["paths"]
        assert {"/v1/embeddings", "/v1/classify", "/v1/models", "/health", "/metrics"} <= paths.keys()
        assert "Embeddings" in json.dumps(paths["/v1/embeddings"]["post"]["responses"]["200"])
        assert server.ask("/v1/classify", {"input": "a"})[0] == 401
        with pytest.raises(openai.NotFoundError, match="there is no /v1/chat/completions here"):
            server.client(api_key="secret").chat.completions.create(
                model="x", messages=[{"role": "user", "content": "a"}]
            )


def test_a_full_server_refuses_at_once(classifier: Path) -> None:
    places = Places(1)
    with serving(load_reader(classifier, TEXTS), places=places) as server, places.held(1):
        code, headers, _ = server.ask("/v1/embeddings", {"input": "a"})
        assert (code, headers["retry-after"]) == (429, "1")


def test_an_answer_that_takes_too_long_is_given_up(classifier: Path) -> None:
    model = replace(load_reader(classifier, TEXTS), tokenizer=_Slow())
    with serving(model, seconds=0.2) as server:
        code, _, found = server.ask("/v1/classify", {"input": "a"})
        assert (code, found["error"]["code"]) == (504, "timeout")


class _Slow:
    def __call__(self, *given: Any, **named: Any) -> Any:
        time.sleep(1)
        raise ValueError(f"{given} {named}: nobody waits for it")


def test_an_encoder_has_no_classes_and_pools_as_its_files_say(tmp_path: Path) -> None:
    folder = bert(tmp_path / "masked", BertForMaskedLM)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert kind_of(folder, "best", False) == ENCODER
    with serving(load_reader(folder, ENCODER)) as server:
        found = server.client().embeddings.create(model="masked", input=TEXTS_ASKED)
        assert server.ask("/v1/classify", {"input": "a"})[0] == 404
    model, tokenizer = BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for row, text in zip(found.data, TEXTS_ASKED, strict=True):
        with torch.no_grad():
            first = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0]
        assert row.embedding == pytest.approx((first / first.norm()).tolist(), abs=1e-5)


def test_an_encoder_remembers_no_text_after_its_tokens_are_there(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(["<pad>"])
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_reader(tmp_path, ENCODER)
    assert isinstance(model, TextEncoder)

    def ask(first: int) -> None:
        for number in range(first, first + 1000):
            model.tokens([f"text {number} " * 5])

    ask(0)
    assert kept_bytes(lambda: ask(1000)) < 100_000  # 2 MB where they are kept


def test_a_head_that_was_never_trained_is_not_served(tmp_path: Path) -> None:
    folder = bert(tmp_path / "masked", BertForMaskedLM)
    with pytest.raises(UserError, match="no weights for classifier"):
        load_reader(folder, TEXTS)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8))


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    held = io.BytesIO()
    image.save(held, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(held.getvalue()).decode()}"


def test_pictures_are_classified_as_they_were_prepared_for_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], id2label={0: "cat", 1: "dog"})
    ResNetForImageClassification(config).save_pretrained(tmp_path / "net")
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
    write_preprocessing(tmp_path / "net", 32, 32, mean, std)
    assert kind_of(tmp_path / "net", "best", False) == PICTURES
    images = [picture(32, 32), picture(48, 64, 1).convert("RGB")]
    with serving(load_reader(tmp_path / "net", PICTURES)) as server:
        found = server.ask("/v1/classify", {"input": [data_url(each) for each in images]})[2]
        for given, told in (
            ("https://example.org/cat.png", "no address is fetched"),
            ("data:image/png;base64,!!", "input 0"),
            ("data:image/png;base64,AAAA", "cannot be read as an image"),
            (data_url(Image.new("1", (9000, 9000))), "81,000,000 pixels, more than 50,000,000"),
        ):
            code, _, refused = server.ask("/v1/classify", {"input": given})
            assert (code, told in refused["error"]["message"]) == (400, True), refused
    scaled = images[1].resize((42, 32), Image.Resampling.BILINEAR).crop((5, 0, 37, 32))
    plain = AutoModelForImageClassification.from_pretrained(tmp_path / "net").eval()
    for row, image in zip(found["data"], (images[0], scaled), strict=True):
        pixels = (torch.tensor(np.asarray(image)).float() / 255 - torch.tensor(mean)) / torch.tensor(std)
        with torch.no_grad():
            chances = plain(pixel_values=pixels.permute(2, 0, 1)[None]).logits[0].softmax(-1).tolist()
        assert list(row["probabilities"].values()) == pytest.approx(chances, abs=1e-5)


def test_a_run_classifies_as_its_predictions(
    drivetrain: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bert(tmp_path / "bert", BertModel)
    rows = "".join(f"{'good' if n % 2 else 'bad'},word{n} {'good' if n % 2 else 'hôtel'}\n" for n in range(16))
    Path("reviews.csv").write_text("label,text\n" + rows, encoding="utf-8")
    data = {"train": "reviews.csv", "evaluation_fraction": 0.25, "max_length": 16}
    workload = {"type": "text_classification", "model": {"path": "bert"}, "data": data}
    Path("run.json").write_text(json.dumps({"workload": workload, "batch_size": 4, "loop": {"steps": 2}}))
    assert drivetrain("train", "run.json", "output=out")[0] == 0
    texts = ["word3 good", "hôtel word5 " * 20]
    code, out, told = drivetrain("predict", "run.json", "output=out", "--text", texts[0], "--text", texts[1])
    assert code == 0, told
    model = load_reader(Path("out"), kind_of(Path("out"), "best", False))
    with serving(model) as server:
        found = server.ask("/v1/classify", {"input": texts})[2]["data"]
    for row, line in zip(found, out.splitlines(), strict=True):
        predicted = json.loads(line)
        assert row["label"] == predicted["label"]
        assert row["probabilities"] == pytest.approx(predicted["probabilities"], abs=2e-6)
    assert [row["truncated"] for row in found] == [False, True]


def test_a_model_that_writes_is_served_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    assert kind_of(tmp_path, "best", False) == WRITER
