"""Files that operators and viewers must not read through the board: the administrator's token, hidden files, and what
lies outside the board's folders, however a run file or a form names them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.board import places as module
from drivetrain.board.access import User
from drivetrain.board.board import OWN, Board
from drivetrain.board.places import Places
from drivetrain.data.data_files import data_files
from drivetrain.data.shard_paths import shard_files
from drivetrain.errors import UserError
from drivetrain.init.catalogue import recipe, recipes
from tests.board.boards import DIGITS, TOKENS, USERS, by, serving
from tests.board.test_jobs import trained
from tests.running_server import Running

SECRET = "the-secret-token-of-the-administrator"
LANGUAGE = """\
workload:
  type: language_model
  stage: sft
  model: {config: {model_type: llama}, tokenizer: bytes}
  data: {train: %s, template: %s}
batch_size: 4
loop: {steps: 1}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/, with the board's own folder, lies in the folder of data, as it does for a board that is started without
    options."""
    found = tmp_path_factory.mktemp("board")
    for name in ("runs/.board", "data/few", "data/.cache", "elsewhere/inner"):
        (found / "here" / name if name != "elsewhere/inner" else found / name).mkdir(parents=True)
    here = found / "here"
    for name in ("runs/.board/token", "data/.cache/token", "data/.token"):
        (here / name).write_text(SECRET)
    (found / "elsewhere" / "inner" / "secret.jsonl").write_text(SECRET)
    (here / "data" / "rows.jsonl").write_text('{"text": "a"}\n')
    (here / "data" / "few" / "rows.jsonl").write_text('{"text": "a"}\n')
    (here / "data" / "linked.jsonl").symlink_to(here / "runs" / ".board" / "token")
    (here / "data" / "outside").symlink_to(found / "elsewhere")
    return here


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[tuple[Running, Board]]:
    with serving(place / "runs", USERS, data=[place]) as found:
        yield found


@pytest.fixture
def judge(place: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))
    return Places((place / "runs", place), place / "runs" / OWN)


HIDDEN = (
    *("{here}/runs/.board/token", "runs/.board/token", "./runs/../runs/.board/token", "~/runs/.board/token"),
    *("{here}/data/../runs/.board/token", "{here}/data/linked.jsonl", "{here}/data/.token", "data/.cache/token"),
    *("{here}/runs/.board", "{here}/runs/.board/not-yet-there", "{here}/../elsewhere", "../elsewhere/not-there"),
    *("{here}/data/outside/inner/secret.jsonl", "/etc/passwd", "/etc/not-there", "/", ".."),
)
PATTERNS = (
    *("{here}/runs/.board/*", "{here}/runs/.board/tok{e,}n", "{here}/runs/{.board,x}/token", "runs/{.board,x}/token"),
    *("{here}/data/*/../../runs/.board/token", "{here}/data/{..,x}/runs/.board/token", "{here}/data/l*.jsonl"),
    *("{here}/data/*/../*", "{here}/data/f*/{..,few}/../../elsewhere/*", "{here}/data/*/*/secret.jsonl"),
    *("{here}/data/**/secret.jsonl", "/etc/pass*", "/etc/{passwd,x}", "../*/inner/*", "{..,x}/elsewhere/inner/*"),
    *("~/runs/.board/t*", "{here}/{0..0}/../runs/.board/token", "{here}/.{board,x}/*", "{here}/**/linked.*"),
)
MATCH_NOTHING_HIDDEN = (
    *("{here}/runs/*/token", "{here}/runs/?board/token", "{here}/runs/[.]board/token", "{here}/**/token"),
    *("{here}/*/*/token", "{here}/data/[!a]token", "runs/[.]*/t*"),
)


def named(text: str, here: Path) -> str:
    return text.replace("{here}", str(here))


@pytest.mark.parametrize("text", HIDDEN + PATTERNS)
def test_no_path_or_pattern_leads_out_or_to_what_is_hidden(judge: Places, place: Path, text: str) -> None:
    [problem] = judge.problems({"a": {"list": [{"of": named(text, place)}]}})
    assert problem.field == "a.list.of"
    assert SECRET not in problem.why


@pytest.mark.parametrize("text", MATCH_NOTHING_HIDDEN)
def test_wildcards_match_no_hidden_name_for_any_reader(judge: Places, place: Path, text: str) -> None:
    given = named(text, place)
    assert judge.problems({"train": given}) == [], "it can be named, since it reads nothing hidden"
    for read in (lambda: shard_files(given, "train", ("",)), lambda: data_files(given, "train", ("",))):
        with pytest.raises(UserError):
            read()


def test_texts_that_are_no_paths_and_files_of_the_folders_may_be_named(judge: Places, place: Path) -> None:
    fine = (
        *("data/rows.jsonl", f"{place}/data/*.nothing", f"{place}/data/f*/rows.jsonl", f"{place}/data/{{few,more}}/*"),
        *("meta-llama/Llama-3", "/no_think", "{{ message }}", "a *b* {c}? [d]", "~", "~~", "x" * 5000, "\0", "{0..9}"),
        *("https://example.org/a", "", "ä/ö", "runs/mine/checkpoints/*", str(place), "data"),
    )
    assert judge.problems({"texts": list(fine)}) == []


def test_a_pattern_of_very_many_names_is_refused_at_once(
    judge: Places, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("{here}/{0..999999999999}.tar", "{here}/" + "{0..99}" * 10):
        assert "names" in judge.problems({"train": named(text, place)})[0].why
        with pytest.raises(UserError, match="stands for"):
            shard_files(named(text, place), "train", (".tar",))
    monkeypatch.setattr(module, "MOST_NAMES", 3)
    assert judge.problems({"train": f"{place}/**/rows.jsonl"}), "one that looks through too many folders"


# --- through the server ----------------------------------------------------------------------------------------------


def refused(answer: tuple[int, Any]) -> list[str]:
    """Returns the reasons of an answer that refuses places, and no content of a file."""
    assert SECRET not in json.dumps(answer[1])
    return [each["why"] for each in answer[1].get("problems", []) if "of this board" in each["why"]]


@pytest.mark.parametrize("path", ["/api/queue", "/api/check", "/api/check/full", "/api/data/preview", "/api/plan"])
@pytest.mark.parametrize(
    "text",
    [
        LANGUAGE % ("data/rows.jsonl", "runs/.board/token"),
        LANGUAGE % ("runs/.board/token", "chatml"),
        LANGUAGE.replace("tokenizer: bytes", "tokenizer: runs/.board/token") % ("data/rows.jsonl", "chatml"),
        LANGUAGE % ("[{path: data/rows.jsonl}, {path: 'runs/{.board,x}/token'}]", "chatml"),
        DIGITS + "engine: {name: accelerate, config: runs/.board/token}\n",
        DIGITS + "engine: {name: deepspeed, config: data/.token}\n",
        DIGITS + "adapter: {path: data/.cache}\n",
    ],
)
def test_no_run_file_of_an_operator_reads_the_token(
    served: tuple[Running, Board], place: Path, path: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    body = {"yaml": text, **({"key": "the-key-of-an-attack"} if path == "/api/queue" else {})}
    status, found = by(served[0], "otto", path, body)
    assert refused((status, found))
    assert status == (200 if path == "/api/check" else 422)
    assert served[1].queue.entries.all() == []


def test_a_viewers_check_reads_no_file_either(
    served: tuple[Running, Board], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    text = DIGITS + "engine: {name: accelerate, config: %s}\n"
    for name in ("/etc/passwd", "/etc/not-there", "runs/.board/token"):
        assert refused(by(served[0], "vera", "/api/check", {"yaml": text % name})), name
    assert not refused(by(served[0], "anna", "/api/check", {"yaml": text % "runs/.board/token"}))


def test_operators_code_lets_operators_name_files_and_viewers_none(place: Path, tmp_path: Path) -> None:
    text = DIGITS + f"engine: {{name: accelerate, config: {place}/data/rows.jsonl}}\n"
    with serving(tmp_path / "runs", USERS, operators_code=True) as (server, _):
        assert not refused(by(server, "otto", "/api/check", {"yaml": text}))
        assert refused(by(server, "vera", "/api/check", {"yaml": text}))


def test_names_of_a_registry_lead_to_no_file_elsewhere(
    served: tuple[Running, Board], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    entries = {"mine": {"file_name": "../runs/.board/token"}, "few": {"file_name": "rows.jsonl"}}
    (place / "data" / "dataset_info.json").write_text(json.dumps(entries))
    text = LANGUAGE.replace("data: {", "data: {registry: data, ")
    bad, good = (by(served[0], "otto", "/api/queue", {"yaml": text % (name, "chatml"), "key": f"key-of-{name}"})
                 for name in ("mine", "few"))  # fmt: skip
    assert [each["field"] for each in bad[1]["problems"]] == ["workload.data.registry"]
    assert good[0] == 201
    by(served[0], "otto", f"/api/queue/{good[1]['id']}/cancel", {})
    by(served[0], "otto", f"/api/queue/{good[1]['id']}", method="DELETE")


@pytest.mark.parametrize(
    "axis",
    [
        "workload.data.train=/etc/passwd,digits",
        "workload.model.trust_remote_code=true",
        "workload={type: module, path: data/rows.jsonl}",
        "optimizer.name=os.system",
        "tracking.trackers=[os:system]",
        "engine.config=runs/.board/token",
        "train=few",
    ],
)
def test_no_axis_of_a_plan_names_files_or_code(
    served: tuple[Running, Board], place: Path, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(served[1].verbs, "plan", lambda *_: pytest.fail("nothing may start"))
    status, found = by(served[0], "otto", "/api/plan", {"yaml": DIGITS, "axes": [axis]})
    assert (status, {each["field"] for each in found["problems"]} & {"axes"}) == (422, {"axes"})


def test_axes_of_words_and_numbers_are_planned(served: tuple[Running, Board], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served[1].verbs, "plan", lambda *_: {"rows": []})
    axes = ["engine=ddp,fsdp", "precision=fp32,bf16-mixed", "lr=0.1,1e-3", "batch_size=64"]
    assert by(served[0], "otto", "/api/plan", {"yaml": DIGITS, "axes": axes})[0] == 200


@pytest.mark.parametrize(
    "inner", ["runs/.board/token", "data/.token", "runs/.board", "data/linked.jsonl", "data/.cache"]
)
def test_forms_and_the_picker_lead_to_nothing_hidden(served: tuple[Running, Board], place: Path, inner: str) -> None:
    trained(served[1], "one")
    for name in ("otto", "anna"):
        assert by(served[0], name, f"/api/files?path={place}/{inner}")[0] == 404
        for verb, field in (("evaluate", "data"), ("predict", "path")):
            body = {"key": "the-key-of-an-attack", field: f"{place}/{inner}"}
            assert by(served[0], name, f"/api/runs/one/{verb}", body)[0] == 404


def test_a_recipes_name_leads_to_no_other_file(served: tuple[Running, Board], place: Path) -> None:
    (place / "data" / "mine.yaml").write_text("seed: 1\n")
    for name in (f"{place}/data/mine", f"{place}/data/mine.yaml", "../recipes/digits"):
        assert by(served[0], "vera", "/api/command", {"yaml": DIGITS, "recipe": name})[0] == 422


@pytest.mark.parametrize("name", [name for name, _ in recipes()])
def test_every_recipe_may_be_checked_by_an_operator(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "runs", data=[tmp_path]) as (_, board):
        found = board.check(User("otto", "operator"), recipe(name).read_text(encoding="utf-8"))
        assert not [each for each in found.problems if "of this board" in each.why]


def test_the_board_itself_may_use_what_its_own_folder_holds(served: tuple[Running, Board], place: Path) -> None:
    server, board = served
    trained(board, "one")
    headers = {"content_type": "application/octet-stream", "authorization": f"Bearer {TOKENS['otto']}"}
    upload = server.ask("/api/uploads?name=rows.csv", b"text\nGood.\n", **headers)[2]["id"]
    status, found = by(server, "otto", "/api/runs/one/predict", {"key": "the-key-of-an-upload", "upload": upload})
    assert status == 201
    assert f"{place}/runs/.board/uploads/{upload}" in found["command"]
