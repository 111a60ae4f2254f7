"""Starts a board over a folder of runs, until it is stopped. What it started goes on without it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from drivetrain.board.access import ADMIN, Access, User, digest, kept_secret
from drivetrain.board.app import Guards, application
from drivetrain.board.audit import Audit
from drivetrain.board.board import OWN, Board
from drivetrain.board.notify import Notifier
from drivetrain.errors import UserError, problem
from drivetrain.runtime.lock import held
from drivetrain.web.keys import SHORTEST
from drivetrain.web.server import Address, run

VARIABLE = "DRIVETRAIN_BOARD_TOKEN"
STOP_SECONDS = 2  # for answers in the making; streams are cut


def serve(
    root: Path,
    data: Sequence[Path],
    listening: socket.socket,
    address: Address,
    names: Sequence[str],
    base: str,
    users: Mapping[str, User],
    operators_code: bool,
    webhook: str | None,
    ready: Callable[[str], None],
) -> None:
    """Serves until Ctrl-C or SIGTERM. names: of the host, besides localhost. users: beside the administrator, by the
    digests of their tokens. webhook: gets a message at each end. ready: called with the token once it accepts
    connections. Raises UserError where the folder cannot be had."""
    with ExitStack() as stack:
        own = stack.enter_context(_own_folder(root))
        port = "socket" if address.unix_socket else str(listening.getsockname()[1])
        token = token_of(own)
        every = {**users, digest(token): User(ADMIN, "administrator")}
        secret = kept_secret(own / "secret").encode()
        access = Access(every, secret, f"drivetrain-board-{port}", own / "ended_sessions.json")
        board = Board.at(root, data, operators_code=operators_code)
        if webhook is not None:
            notifier = Notifier(board.queue.entries, webhook)
            stack.callback(notifier.close)
            board.queue.watch(notifier.look)
        board.start()
        stack.callback(board.close)
        app = application(board, access, Audit(own / "audit.jsonl"), Guards(names, address.is_public, base))
        # previews end before the answers that wait for them, for which the server would wait in turn
        run(app, listening, STOP_SECONDS, lambda: ready(token), board.verbs.close)


def token_of(own: Path) -> str:
    """Returns the administrator's token: that of the environment, or one that was made at the first start."""
    given = os.environ.get(VARIABLE, "").strip()
    if given and len(given) < SHORTEST:
        fix = "leave it out, or make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        raise problem(VARIABLE, f"it has fewer than {SHORTEST} characters, which can be guessed", fix)
    return given or kept_secret(own / "token")


@contextmanager
def _own_folder(root: Path) -> Iterator[Path]:
    """Makes the board's own folder, which no other user may read, and locks it while the block runs.

    Raises UserError for a second board on the same runs: two queues would fill one device twice.
    """
    own = root / OWN
    try:
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise problem("--runs", f"{own} cannot be written: {error.strerror}", "give another folder") from None
    with ExitStack() as stack:
        try:
            stack.enter_context(held(own))
        except UserError as error:
            why = error.problems[0].why.replace("a run is working in", "a board is open on")
            raise problem("--runs", why, "use that one, or give another folder") from None
        yield own
