from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.data.language.registry import Entry, find, read_registry
from drivetrain.data.language.row_schema import RowSchema
from drivetrain.errors import UserError


def registry(folder: Path, content: Any) -> dict[str, Entry]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "dataset_info.json").write_bytes(text)
    return read_registry(str(folder), "workload.data.registry")


def refusal(folder: Path, entry: Any) -> str:
    entries = registry(folder, {"good": {"file_name": "good.json"}, "bad": entry})
    assert find(entries, "good", "F").path == str(folder / "good.json")
    with pytest.raises(UserError) as caught:
        find(entries, "bad", "workload.data.train")
    assert {each.field for each in caught.value.problems} == {"workload.data.train"}
    return str(caught.value)


def test_an_entry_says_what_it_says(tmp_path: Path) -> None:
    given = {
        "file_name": "sub/chat.jsonl",
        "formatting": "sharegpt",
        "ranking": True,
        "num_samples": 7,
        "columns": {"messages": "talk", "chosen": "better", "rejected": "worse", "system": None},
        "tags": {"role_tag": "role", "user_tag": "person"},
    }
    entry = find(registry(tmp_path, {"chat": given}), "chat", "F")
    columns, tags = {"messages": "talk", "chosen": "better", "rejected": "worse"}, {"role_tag": "role"}
    tags["user_tag"] = "person"
    path = str(tmp_path / "sub" / "chat.jsonl")
    assert entry == Entry("chat", path, "sharegpt", columns, tags, num_samples=7, ranking=True)
    assert entry.form == RowSchema("sharegpt", columns, tags, ranking=True)


def test_defaults_are_those_of_llama_factory(tmp_path: Path) -> None:
    entry = find(registry(tmp_path, {"a": {"file_name": "a.json"}}), "a", "F")
    assert (entry.formatting, entry.split, entry.ranking, entry.columns, entry.tags) == (
        "alpaca",
        "train",
        False,
        {},
        {},
    )
    assert (entry.subset, entry.folder, entry.num_samples) == (None, None, None)


def test_a_hub_id_goes_before_a_file_and_that_before_what_cannot_be_had(tmp_path: Path) -> None:
    given = {
        "hub": {"hf_hub_url": "owner/name", "ms_hub_url": "x", "file_name": "a.json", "subset": "en", "split": "test"},
        "file": {"ms_hub_url": "x", "file_name": "a.json", "file_sha1": "0"},
    }
    entries = registry(tmp_path, given)
    hub = find(entries, "hub", "F")
    assert (hub.path, hub.subset, hub.split) == ("owner/name", "en", "test")
    assert find(entries, "file", "F").path == str(tmp_path / "a.json")


def test_the_file_may_be_given_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text('{"a": {"file_name": "a.json"}}', encoding="utf-8-sig")
    monkeypatch.chdir(tmp_path)
    entries = read_registry("mine.json", "F")
    assert find(entries, "a", "F").path == str(tmp_path / "a.json")  # in full: not to be taken for a hub id


REFUSED = {
    "no object": ([1], ["it is a list"]),
    "no place": ({"formatting": "alpaca"}, ["names no place", "file_name or hf_hub_url"]),
    "a place that is no text": ({"file_name": ["a.json"]}, ["its file_name is a list"]),
    "ModelScope": ({"ms_hub_url": "x"}, ["ModelScope only"]),
    "OpenMind": ({"om_hub_url": "x"}, ["OpenMind only"]),
    "a script": ({"script_url": "x"}, ["script"]),
    "a cloud": ({"cloud_file_name": "s3://x"}, ["cloud"]),
    "pictures": ({"file_name": "a", "columns": {"images": "i", "videos": "v"}}, ["it has images and videos", "texts"]),
    "sound": ({"file_name": "a", "columns": {"audios": "i"}}, ["it has audios"]),
    "a wrong key": ({"file_name": "a", "colums": {}}, ["unknown key colums", "did you mean columns?"]),
    "a wrong column": (
        {"file_name": "a", "columns": {"promt": "q"}},
        ["columns.promt", "did you mean columns.prompt?"],
    ),
    "a wrong tag": (
        {"file_name": "a", "tags": {"user": "q"}},
        ["unknown key tags.user", "did you mean tags.user_tag?"],
    ),
    "a column that is no name": ({"file_name": "a", "columns": {"prompt": 3}}, ["columns.prompt is a number"]),
    "columns that are no object": ({"file_name": "a", "columns": ["q"]}, ["its columns are a list"]),
    "a wrong format": (
        {"file_name": "a", "formatting": "chatml"},
        ["formatting is 'chatml'", "alpaca, sharegpt, openai"],
    ),
    "messages in alpaca": ({"file_name": "a", "columns": {"messages": "m"}}, ["columns.messages", '"sharegpt"']),
    "prompts in sharegpt": (
        {"file_name": "a", "formatting": "sharegpt", "columns": {"prompt": "p", "response": "r"}},
        ["columns.prompt and columns.response", '"alpaca"'],
    ),
    "wrong kinds": (
        {"file_name": "a", "ranking": "yes", "num_samples": 0, "split": 3},
        ["ranking is 'yes'", "num_samples is 0", "split is 3"],
    ),
    "several at once": (
        {"formating": "x", "columns": {"images": "i"}},
        ["formating", "it has images", "names no place"],
    ),
}


@pytest.mark.parametrize(("entry", "words"), REFUSED.values(), ids=REFUSED)
def test_an_entry_that_cannot_be_used_says_so_when_it_is_asked_for(
    tmp_path: Path, entry: Any, words: list[str]
) -> None:
    message = refusal(tmp_path, entry)
    assert all(part in message for part in words), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": {"file_name": "a"},\n}', "broken JSON at line 2, column 1"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'[{"a": 1}]', "holds a list"),
        ('{"\u00e9": {}}'.encode("latin-1"), "is not UTF-8"),
    ],
)
def test_a_broken_registry_is_refused_at_once(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        registry(tmp_path, content)


def test_a_missing_registry_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset_info\.json does not exist"):
        read_registry(str(tmp_path), "F")


def test_names_that_are_not_there_bring_the_nearest(tmp_path: Path) -> None:
    entries = registry(tmp_path, {name: {"file_name": "a"} for name in ("identity", "kto_demo", "dpo_demo")})
    for name, words in {
        "identiy": "mean identity?",
        "kto": "mean kto_demo?",
        "zz": "it has: identity, kto_demo",
    }.items():
        with pytest.raises(UserError, match=f"no data set '{name}'\n.*{words}"):
            find(entries, name, "F")


def test_llama_factorys_own_registry_is_read(shared_data: Path) -> None:
    entries = read_registry(str(shared_data / "sft"), "F")
    raw = json.loads((shared_data / "sft" / "dataset_info.json").read_text(encoding="utf-8"))
    assert list(entries) == list(raw)
    shown = {name for name, given in raw.items() if {"images", "videos", "audios"} & given.get("columns", {}).keys()}
    elsewhere = {name for name, given in raw.items() if not {"hf_hub_url", "file_name"} & given.keys()}
    assert {name for name, entry in entries.items() if entry.refusals} == shown | elsewhere
