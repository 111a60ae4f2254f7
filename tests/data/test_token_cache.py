"""Arrays made of texts once: found again by content, made again where they are damaged or cannot be kept."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from drivetrain.data.language.vocabularies import bpe_tokenizer, byte_tokenizer, character_tokenizer
from drivetrain.data.token_cache import Arrays, cached, content_key

IDS = np.arange(5000, dtype=np.int32)


class Making:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Arrays:
        self.times += 1
        return {"ids": IDS}


def get(folder: Path | None, make: Making, key: str = "key") -> tuple[Arrays, str | None]:
    found, warning = cached(folder, key, make, lambda held: len(held["ids"]) == len(IDS))
    assert np.array_equal(found["ids"], IDS)
    return found, warning


def test_what_was_made_once_is_read_afterwards(tmp_path: Path) -> None:
    make = Making()
    assert get(tmp_path / "a" / "b", make)[1] is None
    assert get(tmp_path / "a" / "b", make)[1] is None
    assert make.times == 1
    get(tmp_path / "a" / "b", make, "another key")
    assert make.times == 2
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["another key.npz", "key.npz"]


def test_left_to_itself_it_lies_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    get(None, Making())
    assert (tmp_path / "drivetrain" / "tokenised" / "key.npz").is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    get(None, Making())
    assert (tmp_path / "home" / ".cache" / "drivetrain" / "tokenised" / "key.npz").is_file()


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "of something else", "with code in it"])
def test_damage_is_reported_and_mended(damage: str, tmp_path: Path) -> None:
    make = Making()
    get(tmp_path, make)
    file = tmp_path / "key.npz"
    whole = bytearray(file.read_bytes())
    if damage == "of something else":
        with file.open("wb") as opened:
            np.savez(opened, ids=IDS[:-1])
    elif damage == "with code in it":
        with file.open("wb") as opened:
            np.savez(opened, ids=np.array([print] * len(IDS), dtype=object))
    else:
        whole[whole.index(IDS.tobytes()) + 77] ^= 1
        file.write_bytes({"cut": bytes(whole[:300]), "flipped": bytes(whole), "emptied": b""}[damage])
    warning = get(tmp_path, make)[1]
    assert warning is not None
    assert f"the token cache {file} was damaged" in warning
    assert make.times == 2
    assert get(tmp_path, make)[1] is None
    assert make.times == 2


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    make = Making()
    for _ in range(2):
        warning = get(tmp_path / "file" / "below", make)[1]
        assert warning is not None
        assert f"tokens could not be cached in {tmp_path / 'file' / 'below'}" in warning
        assert "they are made again next time" in warning
    assert make.times == 2


def test_of_two_that_want_the_same_one_makes_it(tmp_path: Path) -> None:
    make = Making()
    others = [threading.Thread(target=get, args=(tmp_path, make)) for _ in range(3)]

    def slowly() -> Arrays:
        for other in others:
            other.start()
        others[0].join(0.5)  # they would be done by then, had they not to wait
        return make()

    assert cached(tmp_path, "key", slowly, bool)[1] is None
    for other in others:
        other.join()
    assert make.times == 1
    assert [file.name for file in tmp_path.iterdir()] == ["key.npz"]


def test_one_that_was_killed_while_making_holds_no_process_up(tmp_path: Path) -> None:
    code = "import os, pathlib, sys; from drivetrain.data.token_cache import cached; "
    code += "cached(pathlib.Path(sys.argv[1]), 'key', lambda: os.kill(os.getpid(), 9), bool)"
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (ended.returncode, [file.name for file in tmp_path.iterdir()]) == (-9, ["key.lock"])
    assert get(tmp_path, Making())[1] is None
    assert [file.name for file in tmp_path.iterdir()] == ["key.npz"]


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may have more than 1,000 bytes; only for so long, for the tests' own output may go to a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_warning_and_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    with full_disk():
        warning = get(tmp_path, Making())[1]
    assert warning is not None
    assert "tokens could not be cached" in warning
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_other_texts_have_another_key_however_they_are_cut(one: list[str], other: list[str]) -> None:
    keys = [content_key(["header"], BYTES, texts) for texts in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


BYTES = byte_tokenizer()
TOKENIZERS: dict[str, Any] = {
    "bytes": BYTES,
    "bytes and an end": byte_tokenizer(["<|end|>"]),
    "bytes and another end": byte_tokenizer(["<|stop|>"]),
    "characters": character_tokenizer(["abc"]),
    "other characters": character_tokenizer(["abd"]),
    "merges": bpe_tokenizer(["the cat sat on the mat"], 270),
    "other merges": bpe_tokenizer(["the dog sat on the log"], 270),
}


def test_every_tokenizer_and_header_has_a_key_of_its_own() -> None:
    keys = {content_key(header, each, ["text"]) for each in TOKENIZERS.values() for header in (["a"], ["b"], [None])}
    assert len(keys) == 3 * len(TOKENIZERS)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_that_was_used_has_the_key_of_a_fresh_one(tokenizer: Any) -> None:
    before = content_key([], tokenizer, ["abc"])
    tokenizer(["abc", "a" * 99], truncation=True, max_length=3)
    if tokenizer.pad_token is not None:
        tokenizer(["abc", "a"], padding=True)
    assert content_key([], tokenizer, ["abc"]) == before


def test_splitting_special_tokens_has_a_key_of_its_own() -> None:
    whole, split = byte_tokenizer(["<|end|>"]), byte_tokenizer(["<|end|>"])
    split.split_special_tokens = True
    assert whole("<|end|>")["input_ids"] != split("<|end|>")["input_ids"]
    assert content_key([], whole, ["a"]) != content_key([], split, ["a"])


def test_code_of_its_own_has_a_key_of_its_own() -> None:
    class Own(PreTrainedTokenizerFast):
        pass

    own = Own(tokenizer_object=BYTES.backend_tokenizer)
    plain = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer)
    assert content_key([], own, ["a"]) != content_key([], plain, ["a"])


def test_half_of_a_surrogate_pair_has_a_key() -> None:
    assert content_key([], BYTES, ["\ud800"]) != content_key([], BYTES, ["\ud801"])
