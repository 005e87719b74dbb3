"""XML documents of an S3 service, written and read by botocore's own serializer and parser. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote, urlencode

from botocore.parsers import ResponseParserError, create_parser
from botocore.serialize import create_serializer
from botocore.session import Session

from descriptors.errors import CallerError, ErrorCode, ServerError

_UNWRITABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it goes over the wire: `target` is path and query, percent-encoded; header names as they come."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


def call_of(operation: str, parameters: Mapping[str, Any]) -> Call:
    """The request of an operation of the S3 API, by the names of its model. Raises CallerError(InvalidArgument) for
    text that no XML document can have.
    """
    made = _serializer().serialize_to_request(dict(parameters), _model().operation_model(operation))
    query = urlencode({name: _text(value) for name, value in made["query_string"].items()}, quote_via=quote)
    joint = "&" if "?" in made["url_path"] else "?"
    return Call(
        made["method"], made["url_path"] + (joint + query if query else ""), made["headers"], _written(made["body"])
    )


def is_writable(text: str) -> bool:
    """Whether an XML document can have this text (XML 1.0, section 2.2)."""
    return _UNWRITABLE.search(text) is None


def _written(body: bytes) -> bytes:
    """A document as every parser reads it: a bare CR would become LF (XML 1.0, section 2.11), and name another key."""
    if not body:
        return body
    if not is_writable(body.decode()):
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "a character that no XML document can have", field="key")
    return body.replace(b"\r", b"&#13;")


def result_of(operation: str, status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """The answer to an operation, by the names of its model. Raises ServerError(InternalError) for what is no such
    document.
    """
    answer = {
        "status_code": status,
        "headers": _Headers(headers),
        "body": body,
        "context": {"operation_name": operation},
    }
    shape = _model().operation_model(operation).output_shape
    try:
        found: dict[str, Any] = _parser().parse(answer, shape)
    except (ResponseParserError, ValueError, KeyError) as error:
        problem = f"the upstream store's answer to {operation} is no such document"
        raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True) from error
    return found


class _Headers(dict[str, str]):
    """Headers with lower-case names that are found whatever the case of the name asked for, as the parser asks."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _model() -> Any:
    return Session().get_service_model("s3")


@cache
def _serializer() -> Any:
    return create_serializer("rest-xml", include_validation=False)


@cache
def _parser() -> Any:
    return create_parser("rest-xml")
