"""Who gets in: attacks on the login, on the origin of requests and on the paths they name, from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.board.access import Access, User, digest, kept_secret
from drivetrain.board.app import MOST_JSON, OPEN
from drivetrain.board.board import OWN, Board
from drivetrain.board.start import VARIABLE, serve, token_of
from drivetrain.errors import UserError
from drivetrain.web.server import Address, bound
from tests.board.boards import DIGITS, TOKEN, ask, serving, write_run
from tests.running_server import Running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("board") / "runs"


@pytest.fixture(scope="module")
def made(place: Path) -> Iterator[tuple[Running, Board]]:
    with serving(place) as found:
        yield found


@pytest.fixture(scope="module")
def server(made: tuple[Running, Board]) -> Running:
    return made[0]


def form(key: str = "a-key-of-a-form") -> dict[str, Any]:
    return {"key": key, "yaml": DIGITS}


def test_no_path_is_open_beside_the_login(server: Running) -> None:
    _, described = ask(server, "/api/openapi.json")
    methods = [(method.upper(), path) for path, each in described["paths"].items() for method in each]
    assert len(methods) > 20
    unknown = [("GET", path) for path in ("/static/page.css", "/nothing", "//login", "/login/", "/LOGIN", "/api//me",
                                          "/static/../login", "/static/login.js/", "/api/events")]  # fmt: skip
    for method, path in [*methods, *unknown]:
        if path in OPEN:
            continue
        status, _, found = server.ask(path.replace("{name}", "x").replace("{inner}", "y"), method=method)
        assert (status, found["error"]["code"]) == (401, "not_logged_in"), (method, path)


def test_a_page_without_a_cookie_is_sent_to_the_login_by_a_relative_address(server: Running) -> None:
    status, headers, _ = server.ask("/")
    assert (status, headers["location"]) == (303, "login")


def test_a_token_becomes_a_cookie_that_scripts_cannot_read_and_other_sites_cannot_send(server: Running) -> None:
    status, headers, found = server.ask("/login", {"token": TOKEN})
    assert (status, found["user"]["role"]) == (200, "administrator")
    cookie, *rest = headers["set-cookie"].split("; ")
    assert {each.lower() for each in rest} == {"httponly", "samesite=strict"}, "no path: a proxy's own stays in it"
    assert TOKEN not in headers["set-cookie"]
    assert server.ask("/api/me", cookie=cookie)[0] == 200
    for changed in (cookie[:-1], cookie + "0", cookie.replace("YWRtaW4", "cm9vdA"), cookie.split(".")[0]):
        assert server.ask("/api/me", cookie=changed)[0] == 401
    assert server.ask("/api/logout", {}, cookie=cookie)[0] == 204
    assert server.ask("/api/me", cookie=cookie)[0] == 401, "who logged out is out, also with a copy of the cookie"


def test_a_cookie_outlives_a_restart_and_ends_with_its_token() -> None:
    users = {digest("one" * 8): User("ann", "operator"), digest("two" * 8): User("bob", "viewer")}
    before, after = Access(users, b"s" * 32, "c"), Access(users, b"s" * 32, "c")
    cookie = before.cookie_of(users[digest("two" * 8)])
    assert after.of_cookie(cookie) == User("bob", "viewer")
    name, ends, nonce, signature = cookie.split(".")
    assert after.of_cookie(f"{name}.{int(ends) + 1}.{nonce}.{signature}") is None
    assert after.of_cookie(f"{name}.1.{nonce}.{signature}") is None
    other = {**users, digest("new" * 8): User("bob", "viewer")}
    del other[digest("two" * 8)]
    assert Access(other, b"s" * 32, "c").of_cookie(cookie) is None, "another token"
    assert Access(users, b"t" * 32, "c").of_cookie(cookie) is None, "another secret"
    promoted = {**users, digest("two" * 8): User("bob", "administrator")}
    assert Access(promoted, b"s" * 32, "c").of_cookie(cookie) is None, "another role"


def test_tokens_cannot_be_guessed(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as (server, _):
        for number in range(20):
            assert server.ask("/login", {"token": f"wrong {number}"})[0] == 401
        status, headers, found = server.ask("/login", {"token": TOKEN})
        assert (status, found["error"]["code"]) == (429, "too_many_wrong_tokens")
        assert int(headers["retry-after"]) >= 1


def test_the_administrators_token_is_made_once_and_no_other_user_may_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    first = token_of(tmp_path)
    assert len(first) >= 32
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert token_of(tmp_path) == first
    (tmp_path / "token").chmod(0o644)
    assert token_of(tmp_path) != first, "others may have read it"
    (tmp_path / "secret").write_text("cut")
    (tmp_path / "secret").chmod(0o600)
    assert len(kept_secret(tmp_path / "secret")) >= 32
    monkeypatch.setenv(VARIABLE, "password")
    with pytest.raises(UserError, match="fewer than 16 characters"):
        token_of(tmp_path)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),  # DNS rebinding
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"content_type": "text/plain"}, 400),  # what a form of another site can send
        ({"content_type": "application/x-www-form-urlencoded"}, 400),
    ],
)
def test_another_sites_page_starts_nothing(server: Running, place: Path, headers: dict[str, str], status: int) -> None:
    cookie = server.ask("/login", {"token": TOKEN})[1]["set-cookie"].split(";")[0]
    before = sorted((place / OWN / "entries").iterdir())
    assert server.ask("/api/queue", form(), cookie=cookie, **headers)[0] == status
    assert sorted((place / OWN / "entries").iterdir()) == before


def test_every_answer_forbids_framing_foreign_scripts_and_caching(server: Running) -> None:
    for path in ("/login", "/api/me", "/api/nothing", "/static/../../app.py"):
        _, headers, _ = server.ask(path, authorization=f"Bearer {TOKEN}")
        policy = headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    assert server.ask("/api/me", authorization=f"Bearer {TOKEN}")[1]["cache-control"] == "no-store"


OUTSIDE = (
    *("../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "..%5csecret.txt", "....//secret.txt"),
    *("/etc/passwd", "%2fetc%2fpasswd", "one/../../secret.txt", "link.txt", "folder/passwd", "a%00b", "." * 300),
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_leads_out_of_a_runs_folder(server: Running, place: Path, path: str) -> None:
    if not (place / "mine").exists():
        write_run(place / "mine")
        write_run(place / "mine-too")
        (place / "secret.txt").write_text("secret")
        (place / "mine" / "link.txt").symlink_to(place / "secret.txt")
        (place / "mine" / "folder").symlink_to("/etc")
        (place / "mine" / "sibling").symlink_to(place / "mine-too")
    assert ask(server, "/api/runs/mine/files/run.yaml")[0] == 200
    for attempt in (f"/api/runs/mine/files/{path}", f"/api/runs/{path}", f"/api/runs/{path}/files/secret.txt",
                    f"/static/{path}", f"/api/queue/{path}/log"):  # fmt: skip
        status, found = ask(server, attempt)
        assert status in (400, 404), attempt
        assert b"secret" not in json.dumps(found, default=str).encode().replace(b"secret.txt", b"")
    assert ask(server, "/api/runs/mine/files/sibling/run.yaml")[0] == 404, "a folder whose name begins the same"
    assert ask(server, "/api/runs/mine/files/")[0] == 404


@pytest.mark.parametrize("name", ["../outside", "a/b", "a\\b", "..", ".hidden", "a\nb", "\0", "x" * 300])
def test_no_name_of_a_run_leaves_the_folder_of_runs(server: Running, place: Path, name: str) -> None:
    text = DIGITS + f"name: {json.dumps(name)}\n"
    status, found = ask(server, "/api/queue", {"key": f"key of {name!r}"[:100], "yaml": text})
    assert status == 422, found
    assert {each["field"] for each in found["problems"]} <= {"name", "yaml"}
    assert not (place.parent / "outside").exists()


def test_a_run_file_cannot_put_its_results_elsewhere(server: Running) -> None:
    status, found = ask(server, "/api/queue", {**form("key-of-output"), "yaml": DIGITS + "output: /tmp/elsewhere\n"})
    assert status == 422
    assert [each["field"] for each in found["problems"]] == ["output"]


def test_what_a_shell_would_run_stays_text(server: Running, made: tuple[Running, Board]) -> None:
    name = "$(touch pwned); `id` && x"
    status, found = ask(server, "/api/queue", {"key": "key-of-a-shell", "yaml": DIGITS + f"name: {json.dumps(name)}\n"})
    assert (status, found["run"]) == (201, name)
    entry = made[1].queue.entries.one(found["id"])
    assert entry is not None
    assert f"name={json.dumps(name)}" in entry.asked.words, "one word, to no shell"


def test_tokens_are_in_no_log(server: Running, place: Path) -> None:
    server.ask("/login", {"token": TOKEN})
    server.ask(f"/api/me?token={TOKEN}")
    ask(server, "/api/queue/settings", {"go_on_after_failure": False})
    text = (place / OWN / "audit.jsonl").read_text()
    assert TOKEN not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"user": "admin", "asked": "POST /api/queue/settings", "status": 200}.items() <= lines[-1].items()
    assert re.fullmatch(r"2\d{3}-.*", lines[-1]["time"])


def test_a_proxys_path_is_taken_off_and_kept_out_of_addresses(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", base="/node/one") as (server, _):
        assert ask(server, "/node/one/api/me")[0] == 200
        assert server.ask("/node/one/")[1]["location"] == "login"
        assert ask(server, "/node/onetwo/api/me")[0] == 404
        assert server.ask("/node/one/api/me")[0] == 401


def test_a_name_that_was_allowed_is_served_and_no_other(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", names=["gpu.example"]) as (server, _):
        assert ask(server, "/api/me", host="gpu.example")[0] == 200
        assert ask(server, "/api/me", host="gpu.example.org")[0] == 421


def test_large_bodies_are_refused(server: Running) -> None:
    status, found = ask(server, "/api/parse", {"yaml": "x" * (2 << 20)})
    assert status == 400
    assert "yaml" in found["error"]["message"]
    assert ask(server, "/api/parse", b'{"yaml": "' + b"x" * (100 << 20) + b'"}')[0] == 413


def test_a_logout_outlives_a_restart(tmp_path: Path) -> None:
    users, file = {digest("one" * 8): User("ann", "operator")}, tmp_path / "ended.json"
    first = Access(users, b"s" * 32, "c", file)
    gone, kept = (first.cookie_of(users[digest("one" * 8)]) for _ in range(2))
    first.end(gone)
    first.end("no.cookie.at.all")
    after = Access(users, b"s" * 32, "c", file)
    assert after.of_cookie(gone) is None
    assert after.of_cookie(kept) is not None
    assert gone not in file.read_text()
    assert len(json.loads(file.read_text())["times"]) == 1, "texts that are no cookies are not kept"
    file.write_text("{")
    assert Access(users, b"s" * 32, "c", file).of_cookie(kept) is not None


def test_a_started_board_keeps_logouts_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.board.start.run", lambda *_: None)
    made: list[Path | None] = []
    real = Access.__init__
    monkeypatch.setattr(Access, "__init__", lambda self, *given: (made.append(given[3]), real(self, *given))[1])
    with bound(Address(port=0)) as listening:
        serve(tmp_path / "runs", [], listening, Address(port=0), [], "", {}, False, None, lambda _: None)
    assert made == [tmp_path / "runs" / OWN / "ended_sessions.json"]


def test_only_who_is_logged_in_may_send_large_bodies(server: Running) -> None:
    large = {"token": "x" * 20_000}
    assert server.ask("/login", large)[0] == 413
    assert (
        server.ask(
            "/login",
            {"token": TOKEN},
        )[0]
        == 200
    )
    assert ask(server, "/api/parse", {"yaml": "# " + "x" * 500_000})[0] == 200
    too_large = json.dumps({"yaml": "x" * MOST_JSON}).encode()
    assert ask(server, "/api/parse", too_large)[0] == 413
    headers = {"authorization": f"Bearer {TOKEN}", "content_type": "application/octet-stream"}
    assert server.ask("/api/uploads?name=a.csv", b"x" * (MOST_JSON + 1), **headers)[0] == 201
