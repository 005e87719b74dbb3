"""Answers of the orchestrator itself, in the forms that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class Refusal(Exception):
    """A request that is answered here, with an error. `param` is the field that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def response(self, headers: Mapping[str, str] | None = None) -> web.Response:
        """The answer."""
        made = web.json_response(self.document(), status=self.status, headers=headers)
        if self.retry_after_s:
            made.headers["Retry-After"] = str(self.retry_after_s)
        return made

    def document(self) -> dict[str, Any]:
        """OpenAI's form of an error."""
        kind = _KINDS.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def event(self) -> bytes:
        """The same in a stream that has begun."""
        return b"data: " + json.dumps(self.document()).encode() + b"\n\n"


class AttemptFailed(Exception):
    """An engine has not answered, and nothing has been sent to the client. `answer` is the engine's refusal, where it
    gave one.
    """

    def __init__(self, message: str, answer: web.Response | None = None) -> None:
        super().__init__(message)
        self.answer = answer
