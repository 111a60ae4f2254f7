"""Requests of other sites' pages, without a key, too often or too large, as their bytes arrive."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import UserError
from drivetrain.web.bodies import BodyLimits, check_json
from drivetrain.web.keys import SHORTEST, WRONG_A_MINUTE, Keys, read_keys
from drivetrain.web.refusals import Refusal
from drivetrain.web.server import Address, bound, check_address
from tests.running_server import Running, serving
from tests.scripted_model import scripted

KEY = "a-key-of-the-tests-0123456789"
BODY = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(names=["gpu7"], bodies=BodyLimits(bytes=100_000, seconds=1)) as found:
        yield found


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:1", "127.5.5.5", "[::1]:80", "GPU7", "gpu7."]
)
def test_the_hosts_own_names_are_taken(server: Running, host: str) -> None:
    assert server.ask("/health", host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7", "evil.example/localhost", "[::2]",
     "localhost:80@evil.example", "0.0.0.0", "", "localhost:x", "2130706433"],
)  # fmt: skip
def test_a_name_that_was_made_to_point_here_is_refused(server: Running, host: str) -> None:
    status, _, found = server.ask(CHAT, BODY, host=host)
    assert status == 421
    assert found["error"]["code"] == "unknown_host"
    assert repr(host) in found["error"]["message"]


def test_a_machines_own_addresses_are_taken_where_it_is_reached_by_them() -> None:
    with serving(addresses=True) as server:
        assert server.ask("/health", host="10.0.0.7:8000")[0] == 200
        assert server.ask("/health", host="evil.example")[0] == 421


def test_a_request_with_two_hosts_or_none_is_refused(server: Running) -> None:
    for lines in (b"Host: localhost\r\nHost: localhost\r\n", b""):
        assert server.raw(b"GET /health HTTP/1.1\r\n" + lines + b"Connection: close\r\n\r\n").split()[1] == b"400"


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:8000", 200), ("https://localhost:8000", 200), ("http://localhost", 403), ("null", 403),
     ("http://evil.example", 403), ("http://localhost:8000.evil.example", 403), ("http://127.0.0.1:8000", 403)],
)  # fmt: skip
def test_a_page_of_another_origin_is_refused(server: Running, origin: str, status: int) -> None:
    assert server.ask(CHAT, BODY, host="localhost:8000", origin=origin)[0] == status


def test_an_origins_default_port_is_the_hosts(server: Running) -> None:
    assert server.ask("/health", host="localhost", origin="http://localhost:80")[0] == 200
    assert server.ask("/health", host="localhost:443", origin="https://localhost")[0] == 200


@pytest.mark.parametrize(
    ("site", "status"), [("none", 200), ("same-origin", 200), ("same-site", 403), ("cross-site", 403)]
)
def test_a_request_that_the_browser_marks_as_another_sites_is_refused(server: Running, site: str, status: int) -> None:
    assert server.ask("/v1/models", sec_fetch_site=site)[0] == status


def test_no_answer_may_be_framed_guessed_or_kept(server: Running) -> None:
    for path in ("/v1/models", "/nothing"):
        _, headers, _ = server.ask(path)
        assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with serving(keys=(KEY, "another-" + KEY), per_minute=1000) as found:
        yield found


@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/metrics", "/openapi.json", "/nothing", "//health", "/health/"])
def test_nothing_but_health_is_open_without_a_key(locked: Running, path: str) -> None:
    status, headers, found = locked.ask(path)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert found["error"]["code"] == "missing_api_key"
    assert locked.ask("/health")[0] == 200


def test_each_key_opens_and_others_do_not(locked: Running) -> None:
    assert locked.ask("/v1/models", authorization=f"Bearer {KEY}")[0] == 200
    assert locked.ask("/v1/models", authorization=f"bearer another-{KEY}")[0] == 200
    for wrong in (f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer ", f"Basic {KEY}", KEY, "Bearer é"):
        status, _, found = locked.ask("/v1/models", authorization=wrong)
        assert (status, found["error"]["code"]) == (401, "invalid_api_key")
        assert KEY not in json.dumps(found)


def test_guessing_keys_is_slowed_down() -> None:
    with serving(keys=(KEY,)) as server:
        found = [server.ask("/v1/models", authorization="Bearer x")[0] for _ in range(WRONG_A_MINUTE + 3)]
        assert found == [401] * WRONG_A_MINUTE + [429] * 3
        assert server.ask("/v1/models", authorization=f"Bearer {KEY}")[0] == 429, "else guesses could go on"


def test_a_caller_has_so_many_requests_a_minute() -> None:
    with serving(keys=(KEY, "another-" + KEY), per_minute=3) as server:
        found = [server.ask("/v1/models", authorization=f"Bearer {KEY}") for _ in range(5)]
        assert [status for status, *_ in found] == [200, 200, 200, 429, 429]
        assert 1 <= int(found[-1][1]["retry-after"]) <= 21
        assert server.ask("/v1/models", authorization=f"Bearer another-{KEY}")[0] == 200


def test_a_client_that_forges_its_address_is_still_the_same_caller() -> None:
    def forged(number: int) -> dict[str, str]:
        address = f"10.0.0.{number}"
        return {"x_forwarded_for": address, "forwarded": f"for={address}", "x_real_ip": address}

    with serving(per_minute=3) as server:
        found = [server.ask("/v1/models", None, "GET", **forged(number))[0] for number in range(5)]
        assert found == [200, 200, 200, 429, 429]
    with serving(keys=(KEY,)) as server:
        for number in range(WRONG_A_MINUTE):
            assert server.ask("/v1/models", None, "GET", authorization="Bearer x", **forged(number))[0] == 401
        assert server.ask("/v1/models", None, "GET", authorization="Bearer x", **forged(99))[0] == 429


def test_no_key_is_in_logs_output_metrics_or_errors(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = "wrong-" + KEY[::-1]
    found = []
    with caplog.at_level("DEBUG"), serving(scripted(fails=RuntimeError("out of memory")), keys=(KEY,)) as server:
        right = {"authorization": f"Bearer {KEY}"}
        found.append(server.ask(CHAT, BODY, **right))
        found.append(server.ask(CHAT, b"{", **right))
        found.append(server.ask("/nothing", **right))
        found.append(server.ask(f"/v1/models?api_key={KEY}", authorization=f"Bearer {wrong}"))
        found.append(server.ask("/metrics", **right))
    assert [status for status, *_ in found] == [500, 400, 404, 401, 200]
    out, err = capfd.readouterr()
    for text in (out, err, caplog.text, repr(found)):
        assert KEY not in text
        assert wrong not in text


def test_keys_are_read_from_a_file_that_is_private_and_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\n{KEY}\n\n another-{KEY} \n")
    file.chmod(0o600)
    monkeypatch.setenv("DRIVETRAIN_API_KEY", "third-" + KEY)
    keys = read_keys(file)
    assert [keys.number(key) for key in ("third-" + KEY, KEY, "another-" + KEY, "x")] == [0, 1, 2, None]
    file.chmod(0o644)
    with pytest.raises(UserError, match="other users may read"):
        read_keys(file)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(UserError, match=f"fewer than {SHORTEST} characters"):
        read_keys(file)
    file.write_text("\n")
    with pytest.raises(UserError, match="holds no key"):
        read_keys(file)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"messages": "\xff"}', "invalid_utf8"),
        (b'{"messages": [{"role": "user", "content": "\xe6\x88"}]}', "invalid_utf8"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "invalid_utf8"),
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "json_too_deep"),
        (b"[" * 90_000, "json_too_deep"),
        (b"[" + b"{}," * 60_000 + b"1]", "body_too_large"),
        (b" " * 100_001, "body_too_large"),
        (b'{"messages": [', "invalid_request"),
        (b"", "invalid_request"),
        (b"null", "invalid_request"),
        (b"NaN", "invalid_request"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "invalid_request"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "invalid_request"),
        (b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}", "invalid_request"),
    ],
)  # fmt: skip
def test_a_hostile_body_is_refused_with_a_reason_and_the_server_lives(server: Running, body: bytes, code: str) -> None:
    status, _, found = server.ask(CHAT, body)
    assert status == (413 if code == "body_too_large" else 400)
    assert found["error"]["code"] == code
    assert 10 < len(found["error"]["message"]) <= 2000
    assert server.ask("/health")[0] == 200


def test_lists_without_end_are_refused_before_they_are_read() -> None:
    with pytest.raises(Refusal, match="more than 50,000 lists and objects"):
        check_json(b"[" + b"{}," * 50_001 + b"1]", BodyLimits())


def test_values_without_end_are_refused_before_they_are_read_and_commas_in_texts_are_none() -> None:
    limits = BodyLimits(values=1000)
    with pytest.raises(Refusal, match="more than 1,000 values"):
        check_json(json.dumps([1] * 1001).encode(), limits)
    check_json(json.dumps([1] * 1000).encode(), limits)
    check_json(json.dumps([',\\",' * 1000] * 9).encode(), limits)


def test_whole_characters_and_brackets_in_texts_pass() -> None:
    check_json(b'["\\ud83d\\ude00", "[[[[[[", "\\\\", "\\"{{"]', BodyLimits(depth=1))


@given(
    st.recursive(
        st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_is_counted_as_it_is_nested(value: Any) -> None:
    def depth(value: Any) -> int:
        if not isinstance(value, list | dict):
            return 0
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)

    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    check_json(body, BodyLimits(depth=depth(value)))
    if depth(value):
        with pytest.raises(Refusal, match="nested more than"):
            check_json(body, BodyLimits(depth=depth(value) - 1))


def test_a_body_that_is_larger_than_its_client_says_is_refused(server: Running) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 0x10000 + b"\r\n10000\r\n" + b"x" * 0x10000
    assert server.raw(head + chunked + b"\r\n0\r\n\r\n").split()[1] == b"413"
    assert server.raw(head + b"Content-Length: -5\r\n\r\n").split()[1] == b"400"
    assert server.raw(head + b"Content-Length: 99999999999999999999999\r\n\r\n").split()[1] in (b"400", b"413")


def test_a_body_that_never_comes_is_given_up(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    answer = server.raw(head + b"{")
    assert answer.split()[1] == b"408"
    assert b"not complete after 1 s" in answer


def test_a_form_of_a_page_is_no_json(server: Running) -> None:
    assert server.ask(CHAT, json.dumps(BODY).encode(), content_type="text/plain")[0] == 400


def test_a_body_does_not_wait_until_its_head_is_acknowledged() -> None:
    """asyncio leaves Nagle's algorithm on for a socket that it did not make: 40 ms an answer."""
    with bound(Address(port=0)) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_is_taken_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with bound(Address(port=0)) as taken, pytest.raises(UserError, match=r"cannot listen on 127.0.0.1:\d+"):
        bound(Address(port=taken.getsockname()[1]))
    path = tmp_path / "socket"
    with bound(Address(unix_socket=path)):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UserError, match="cannot listen"):
            bound(Address(unix_socket=path))
    with bound(Address(unix_socket=path)):  # one that a server left behind
        pass


def test_an_address_that_cannot_be_had_names_its_option_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with bound(Address(unix_socket=tmp_path / "taken")), bound(Address(port=0)) as port:
        for address, option, why, fix in (
            (Address(unix_socket=tmp_path / "file"), "--unix-socket", "a file that is no socket is in", "remove it"),
            (Address(unix_socket=tmp_path / "taken"), "--unix-socket", "a program listens there", "end that program"),
            (Address(unix_socket=tmp_path / "no/s"), "--unix-socket", f"no folder {tmp_path / 'no'}", "make it"),
            (Address(unix_socket=tmp_path / "file/s"), "--unix-socket", "Not a directory", "give another file"),
            (Address(unix_socket=tmp_path / ("x" * 150)), "--unix-socket", "bytes, too many for a", "of at most 100"),
            (Address(unix_socket=tmp_path / ("x" * 300)), "--unix-socket", "bytes, too many for a", "of at most 100"),
            (Address("no-such-name.invalid"), "--host", "cannot listen on no-such-name.invalid:8000", "127.0.0.1"),
            (Address("ä..b"), "--host", "it is no name of a machine", "127.0.0.1"),
            (Address("192.0.2.1"), "--host", "Cannot assign requested address", "127.0.0.1"),
            (Address(port=port.getsockname()[1]), "--port", "Address already in use", "give another --port"),
        ):
            with pytest.raises(UserError) as refused:
                bound(address)
            [found] = refused.value.problems
            assert found.field == option, address
            assert why in found.why, address
            assert fix in found.fix, address
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("request_", [b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\n"
                                      b"Upgrade: websocket\r\n\r\n", b"no request\r\n\r\n"])  # fmt: skip
def test_requests_that_are_none_write_nothing_to_the_terminal(
    request_: bytes, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.raw(request_).startswith(b"HTTP/1.1 4")
    assert not caplog.records


@pytest.mark.parametrize(
    ("host", "is_public"),
    [("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True),
     ("10.0.0.1", True), ("gpu7", True), ("localhost.evil.example", True)],
)  # fmt: skip
def test_which_addresses_other_machines_reach(host: str, is_public: bool) -> None:
    assert Address(host).is_public is is_public


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "gpu7"])
def test_an_address_that_others_reach_needs_a_key(host: str, drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    code, _, told = drivetrain("serve", "no-model", "--host", host)
    assert code == 2
    assert f"other machines reach {host}, and there is no key" in told
    check_address(Address(host), Keys([KEY]))
