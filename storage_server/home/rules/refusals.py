"""The errors that our caller gets when an upstream S3 service refuses. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError, make_error
from descriptors.xml_body import element_of

MESSAGE_CHARACTERS_MAX = 1024
NAME_CHARACTERS_MAX = 128
"""Codes and the names of arguments are a few dozen characters."""
ELEMENTS_MAX = 256
"""An error has no more elements; those of S3 have a dozen."""
RETRY_AFTER_DIGITS = 6
_BY_STATUS: Mapping[int, ErrorCode] = {
    304: ErrorCode.NOT_MODIFIED,
    400: ErrorCode.INVALID_REQUEST,
    403: ErrorCode.ACCESS_DENIED,
    404: ErrorCode.NO_SUCH_KEY,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    409: ErrorCode.CONDITIONAL_CONFLICT,
    411: ErrorCode.MISSING_CONTENT_LENGTH,
    412: ErrorCode.PRECONDITION_FAILED,
    416: ErrorCode.INVALID_RANGE,
    501: ErrorCode.NOT_IMPLEMENTED,
}
"""Errors by status alone: answers to HEAD have no document."""
_OURS_TO_EXPLAIN = frozenset(
    {
        ErrorCode.INVALID_ACCESS_KEY_ID,
        ErrorCode.SIGNATURE_DOES_NOT_MATCH,
        ErrorCode.REQUEST_TIME_TOO_SKEWED,
        ErrorCode.AUTHORIZATION_HEADER_MALFORMED,
        ErrorCode.EXPIRED_TOKEN,
    }
)
"""Errors of the credentials that we use upstream. Our caller's own are good, and must not look wrong."""
_BUSY = frozenset({"SlowDown", "ServiceUnavailable", "503 SlowDown", "Throttling", "TooManyRequests"})


def refusal(status: int, document: bytes, retry_after: str | None = None) -> ObjectCacheError:
    """The error of an answer with this status and body, in the words of upstream."""
    code_text, message, field = _parsed(document)
    if status in (502, 504):
        return unreachable(f"a gateway before it answers {status}: {message}")
    if status in (429, 503) or code_text in _BUSY:
        problem = f"the upstream store is busy: {message or status}"
        return ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True, retry_after_s=_seconds(retry_after))
    try:
        code = ErrorCode(code_text)
    except ValueError:
        code = _BY_STATUS.get(status, ErrorCode.INTERNAL_ERROR)
        message = f"{code_text}: {message}" if code_text else message
    if code in _OURS_TO_EXPLAIN:
        problem = f"the upstream store refuses this server's credentials: {code.value}: {message}"
        return ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=False)
    if code is ErrorCode.INTERNAL_ERROR:
        problem = f"the upstream store failed with {status}: {message}"
        return ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True)
    return make_error(code, message or f"the upstream store answered {status}", field=field)


class NoConnectionError(ServerError):
    """Nobody can connect to the service, whatever is asked for."""

    def __init__(self, problem: str) -> None:
        super().__init__(ErrorCode.SLOW_DOWN, f"the upstream store cannot be reached: {problem}", retryable=True)


def unreachable(problem: str) -> ServerError:
    """The error when upstream does not answer a request, or breaks off."""
    return ServerError(ErrorCode.SLOW_DOWN, f"the upstream store: {problem}", retryable=True)


def is_about(error: ObjectCacheError, *codes: ErrorCode) -> bool:
    """Whether it is a refusal with one of these codes."""
    return isinstance(error, CallerError) and error.code in codes


def _seconds(retry_after: str | None) -> int | None:
    """The seconds of a `Retry-After`; None for a date, or for more digits than anybody means."""
    if retry_after is None or not retry_after.isdecimal() or len(retry_after) > RETRY_AFTER_DIGITS:
        return None
    return int(retry_after)


def _parsed(document: bytes) -> tuple[str, str, str | None]:
    """Code, message and field of an Error document; empty where it is none."""
    try:
        root = element_of(document, ELEMENTS_MAX)
    except ValueError:
        return "", "", None

    def text(name: str, characters_max: int) -> str:
        return next((each.text or "" for each in root.iter() if each.tag == name), "")[:characters_max]

    return (
        text("Code", NAME_CHARACTERS_MAX),
        text("Message", MESSAGE_CHARACTERS_MAX),
        text("ArgumentName", NAME_CHARACTERS_MAX) or None,
    )
