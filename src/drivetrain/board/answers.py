"""Answers in JSON, and who a request comes from."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from drivetrain.board.access import USER, Role, User
from drivetrain.runtime.strict_json import plain
from drivetrain.web.refusals import Refusal


class Json(Response):
    """JSON as other programs read it: null for NaN and infinity, and what they were under "not_finite"."""

    media_type = "application/json"

    def __init__(self, content: dict[str, Any], status_code: int = 200, **given: Any) -> None:
        super().__init__(content, status_code, **given)

    def render(self, content: Any) -> bytes:
        return json.dumps(plain(content), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def user_of(request: Request) -> User:
    found: User = request.scope[USER]
    return found


def allowed(request: Request, role: Role = "operator") -> User:
    """Returns the user. Raises Refusal (403) for one whose role does not allow it."""
    user = user_of(request)
    if not user.may(role):
        raise Refusal(403, f"{user.name} is a {user.role}, and this is for an {role}", "not_allowed")
    return user
