"""Tokenizers of language models: loaded or made from the training data, with the template and the tokens it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drivetrain.data.language.contents import Contents
from drivetrain.data.language.documents import Text
from drivetrain.data.language.sets import DataSet
from drivetrain.errors import UserError
from drivetrain.workloads.language_tokenizer import MadeTokenizer, make_tokenizer
from tests.tiny_language import ROWS, config, loaded, talk, workload

TEXTS = ["the cat sat on the mat", "the dog sat"]
MARKED = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def published(tmp_path: Path) -> str:
    """A tokenizer's folder, with a template of its own and an end of text."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}assistant: "
    made.save_pretrained(tmp_path / "published")
    return str(tmp_path / "published")


def made(folder: Path, contents: list[str] = TEXTS, stage: str = "pretrain", **given: Any) -> MadeTokenizer:
    texts = DataSet("a.txt", len(contents), [Text(each, "a.txt") for each in contents])
    return make_tokenizer(config(folder, ROWS, stage, **given), Contents([texts]))


def refusal(folder: Path, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        made(folder, **given)
    return str(caught.value)


def test_without_a_word_a_model_from_scratch_reads_bytes(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, ["Ü"]).tokenizer
    assert tokenizer("Ü")["input_ids"] == list("Ü".encode())
    assert (len(tokenizer), tokenizer.eos_token_id) == (256, None)


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_a_mark_ends_texts_where_there_are_several(kind: str, tmp_path: Path) -> None:
    model = {"tokenizer": kind, **({"vocabulary_size": 270} if kind == "bpe" else {})}
    assert made(tmp_path, TEXTS[:1], model=model).tokenizer.eos_token is None
    tokenizer = made(tmp_path, TEXTS, model=model).tokenizer
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == len(tokenizer) - 1
    assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == TEXTS[0]


def test_characters_are_those_of_the_texts(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, ["banana"], model={"tokenizer": "characters"}).tokenizer
    assert tokenizer("nab")["input_ids"] == [2, 0, 1]
    assert len(tokenizer) == 4  # and one for all others


def test_bpe_has_the_size_that_was_asked_for_and_merges_what_is_frequent(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, TEXTS, model={"tokenizer": "bpe", "vocabulary_size": 262}).tokenizer
    assert len(tokenizer) == 262
    assert "the" in tokenizer.get_vocab()


def test_characters_of_a_conversation_are_all_known_those_of_its_template_too(tmp_path: Path) -> None:
    work = workload(tmp_path, ROWS, model={"tokenizer": "characters"})
    tokenizer = work._reader.tokenizer
    ids = loaded(work.train)[0][0]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == "<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"


def test_characters_of_functions_and_their_calls_are_known(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "day": 7}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "Ω?", "parameters": {}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    rows = [{"messages": messages, "tools": [tool]}] * 2
    work = workload(tmp_path, rows, model={"tokenizer": "characters"}, length=500, evaluation_fraction=0.5)
    ids = loaded(work.train)[0][0]
    assert work._reader.tokenizer.unk_token_id not in ids
    assert "Zürich" in work._reader.tokenizer.decode(ids)


def test_a_given_folder_is_loaded_with_its_own_template(published: str, tmp_path: Path) -> None:
    found = made(tmp_path, stage="sft", model={"tokenizer": published}, template=None)
    assert found.template is not None
    assert found.template.name == "the tokenizer's own template"
    assert found.added == []
    assert found.tokenizer("the cat")["input_ids"] == AutoTokenizer.from_pretrained(published)("the cat")["input_ids"]


def test_tokens_that_a_template_needs_are_added_and_keep_together(published: str, tmp_path: Path) -> None:
    before = len(AutoTokenizer.from_pretrained(published))
    found = made(tmp_path, stage="sft", model={"tokenizer": published}, template="chatml")
    assert found.added == ["<|im_start|>", "<|im_end|>"]
    assert len(found.tokenizer) == before + 2
    assert found.tokenizer("<|im_start|>the<|im_end|>")["input_ids"][::2] == [before, before + 1]
    assert found.tokenizer.eos_token == "</s>"


def test_the_template_is_saved_with_the_tokenizer(published: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(MARKED)
    source = str(tmp_path / "mine.jinja")
    found = made(tmp_path, stage="sft", model={"tokenizer": published}, template=source)
    found.tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = again.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|>"
    assert again(text)["input_ids"] == found.tokenizer(text)["input_ids"]


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a size for bytes": (
        {"model": {"vocabulary_size": 300}},
        ["workload.model.vocabulary_size: the tokenizer is bytes", "or give tokenizer=bpe"],
    ),
    "bpe without a size": ({"model": {"tokenizer": "bpe"}}, ["vocabulary_size: is required", "e.g. 8000"]),
    "characters of a stream": (
        {"model": {"tokenizer": "characters"}, "stream": True},
        ["workload.model.tokenizer: a stream is not read before", "characters cannot be made", "give bytes"],
    ),
    "bpe of a stream": (
        {"model": {"tokenizer": "bpe", "vocabulary_size": 300}, "stream": True},
        ["bpe cannot be made"],
    ),
    "a template for texts": (
        {"template": "chatml"},
        ["workload.data.template: texts have no chat template", "workload.stage=sft"],
    ),
    "no template for conversations": (
        {"stage": "sft", "template": None},
        ["workload.data.template: the tokenizer has no chat template", "give one of alpaca"],
    ),
    "no such folder": ({"model": {"tokenizer": "./nowhere"}}, ["workload.model.tokenizer: ./nowhere does not exist"]),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_a_cure(given: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    message = refusal(tmp_path, **given)
    for each in words:
        assert each in message


def test_a_stream_of_bytes_needs_no_texts(tmp_path: Path) -> None:
    assert len(made(tmp_path, [], stream=True).tokenizer) == 257
    assert len(workload(tmp_path, [talk("a", "b")] * 3, stream=True)._reader.tokenizer) == 259
