"""Configurations of other software, uploaded: what they become, and what an operator's may not name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.board import run_file
from drivetrain.board.board import Board
from drivetrain.importing.verb import import_files
from tests.board.boards import USERS, by, serving
from tests.running_server import Running

FILES = Path(__file__).parents[1] / "importing" / "files"
LLAMA = (FILES / "llama_factory" / "qwen_lora_sft.yaml").read_text()
SECRET = "the-secret-of-the-administrator"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Board]]:
    root = tmp_path_factory.mktemp("board")
    (root / "data").mkdir()
    (root / "secret.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": SECRET}))
    with serving(root / "runs", USERS, data=[root / "data"]) as found:
        yield found


def sent(server: Running, files: dict[str, str], user: str = "otto", **more: Any) -> tuple[int, Any]:
    return by(server, user, "/api/import", {"files": files, **more})


def test_an_upload_becomes_what_the_command_makes_of_it(served: tuple[Running, Board], tmp_path: Path) -> None:
    server, _ = served
    (tmp_path / "mine.yaml").write_text(LLAMA)
    made = import_files([tmp_path / "mine.yaml"], None, tmp_path / "run.yaml")
    status, found = sent(server, {"mine.yaml": LLAMA})
    assert status == 200, found
    written = (tmp_path / "run.yaml").read_text().replace(f"{tmp_path}/", "")
    assert re.search("^output: ", written, re.MULTILINE)  # which the board gives each run itself
    assert found["yaml"].replace("name: mine\n", "") == re.sub("^output: .*\n", "", written, flags=re.MULTILINE)
    assert "name: mine\n" in found["yaml"]
    assert [(each["key"], each["fate"]) for each in found["notes"]] == [(n.key, n.fate) for _, n in made.notes]
    assert {"changed", "mapped"} <= {each["fate"] for each in found["notes"]}
    assert "/tmp" not in json.dumps(found)


def test_files_that_belong_together_are_sent_together(served: tuple[Running, Board]) -> None:
    server, _ = served
    zero = json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    status, found = sent(server, {"args.yaml": f"{LLAMA}\ndeepspeed: zero.json\n", "zero.json": zero})
    assert status == 200, found
    assert run_file.values_of(found["yaml"])["engine"] == {"name": "deepspeed", "stage": 2}


def test_a_file_without_a_workload_says_what_is_missing(served: tuple[Running, Board]) -> None:
    server, _ = served
    status, found = sent(server, {"args.json": json.dumps({"learning_rate": 1e-4, "output_dir": "x"})})
    assert status == 200
    assert "workload" in found["missing"]
    assert "lr: " in found["yaml"]


def test_a_key_that_changes_what_is_trained_is_dropped_only_on_demand(served: tuple[Running, Board]) -> None:
    server, _ = served
    text = f"{LLAMA}\nmixture_of_depths: convert\n"
    status, found = sent(server, {"mine.yaml": text})
    assert (status, found["accepts"]) == (422, ["mixture_of_depths"])
    assert found["problems"][0]["field"] == "mine.yaml: mixture_of_depths"
    status, found = sent(server, {"mine.yaml": text}, without=["mixture_of_depths"])
    assert status == 200, found
    assert ("mixture_of_depths", "refused") in [(each["key"], each["fate"]) for each in found["notes"]]
    status, found = sent(server, {"mine.yaml": f"{text}\nlearning_rate: -1\n"})
    assert (status, found["accepts"]) == (422, [])  # it would be refused for the rate


@pytest.mark.parametrize("name", ["../mine.yaml", "a/b.yaml", ".mine.yaml", "mine.txt", "files", "一" * 150 + ".yaml"])
def test_names_that_are_no_files_of_a_known_kind_are_refused(served: tuple[Running, Board], name: str) -> None:
    assert sent(served[0], {name: LLAMA})[0] == 422


def test_what_is_no_configuration_is_refused_with_a_reason(served: tuple[Running, Board]) -> None:
    server, _ = served
    for text in ("[1, 2", "a: 1", "- 1", "\x00", "x" * 1000):
        status, found = sent(server, {"mine.yaml": text})
        assert (status, bool(found["problems"])) == (422, True)
        assert "/tmp" not in json.dumps(found)
    assert sent(server, {}, "otto")[0] == 400
    assert sent(server, {"mine.yaml": "x" * (1 << 19)})[0] == 400


def test_python_is_read_and_never_run(served: tuple[Running, Board], tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = f"open({str(made)!r}, 'w')\ntrain_cfg = dict(max_epochs=3)\n"
    sent(served[0], {"config.py": text})
    assert not made.exists()


@pytest.mark.parametrize("template", ["{secret}", "../../../../../../../..{secret}", "~root/.ssh/id_rsa"])
def test_an_operators_file_reads_no_file_outside_the_boards_folders(
    served: tuple[Running, Board], template: str
) -> None:
    server, board = served
    path = template.format(secret=board.root.parent / "secret.json")
    status, found = sent(server, {"mine.yaml": f"{LLAMA}\ndeepspeed: {path}\n"})
    assert status == 422
    assert SECRET not in json.dumps(found)
    assert all("--operators-code" in each["fix"] for each in found["problems"] if "deepspeed" in each["field"])


def test_viewers_import_nothing(served: tuple[Running, Board]) -> None:
    assert sent(served[0], {"mine.yaml": LLAMA}, "vera")[0] == 403
