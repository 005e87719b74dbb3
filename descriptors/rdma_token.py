"""The token of `x-amz-rdma-token`: it names the registered memory that an object is written into, or read from.

    objectcache-1.<base64url, without padding, of a JSON object of the fields of RdmaToken>

The header is signed like any `x-amz-` header. Tokens of other kinds are not parsed and never executed.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict

from descriptors.descriptor import ADDRESS_MAX, require_name, require_request_id
from descriptors.errors import CallerError, ErrorCode
from descriptors.json_body import parse_body

TOKEN_HEADER = "x-amz-rdma-token"
TOKEN_CHARACTERS_MAX = 1024
_OURS = "objectcache-1."


class ObjectPath(Enum):
    """The way of an object's bytes: between storage server and client, or by way of the gateway's memory."""

    DIRECT = "direct"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class RdmaToken:
    """`length` bytes (0 for an empty object) from `offset` of a region of an agent. A GET writes at most `length`
    bytes, a PUT stores exactly `length`. The caller chooses `request_id`, which is used once, like a descriptor's.

    Raises CallerError(InvalidArgument) where docs/reference/protocol.md refuses the value.
    """

    agent_id: str
    region_id: str
    offset: int
    length: int
    request_id: str
    path: ObjectPath = ObjectPath.DIRECT

    def __post_init__(self) -> None:
        try:
            require_name(self.agent_id, "agent_id")
            require_name(self.region_id, "region_id")
            require_request_id(self.request_id)
        except CallerError as error:
            raise bad_token(error.message) from None
        for name, value in (("offset", self.offset), ("length", self.length)):
            if type(value) is not int or not 0 <= value <= ADDRESS_MAX:
                raise bad_token(f"{name} must be an integer from 0 to {ADDRESS_MAX}")
        if self.offset + self.length > ADDRESS_MAX:
            raise bad_token("offset + length passes the end of the address space")


class _TokenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    agent_id: str
    region_id: str
    offset: int
    length: int
    request_id: str
    path: str = ObjectPath.DIRECT.value


def encode_token(token: RdmaToken) -> str:
    """The header's value."""
    fields = {
        "agent_id": token.agent_id,
        "region_id": token.region_id,
        "offset": token.offset,
        "length": token.length,
        "request_id": token.request_id,
        "path": token.path.value,
    }
    data = json.dumps(fields, separators=(",", ":")).encode()
    return _OURS + base64.urlsafe_b64encode(data).decode().rstrip("=")


def parse_token(text: str) -> RdmaToken | None:
    """The token in a header's value; None for a token of another kind. Raises CallerError(InvalidArgument)."""
    if not text.startswith(_OURS):
        return None
    if len(text) > TOKEN_CHARACTERS_MAX:
        raise bad_token(f"a token has at most {TOKEN_CHARACTERS_MAX} characters")
    encoded = text.removeprefix(_OURS)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise bad_token("what follows objectcache-1. is not base64url") from None
    model = parse_body(_TokenModel, data, lambda field, problem: bad_token(f"{field} {problem}"))
    try:
        path = ObjectPath(model.path)
    except ValueError:
        raise bad_token("path must be direct or buffer") from None
    return RdmaToken(
        agent_id=model.agent_id,
        region_id=model.region_id,
        offset=model.offset,
        length=model.length,
        request_id=model.request_id,
        path=path,
    )


def bad_token(problem: str) -> CallerError:
    """The error for a token of ours that is invalid."""
    return CallerError(ErrorCode.INVALID_ARGUMENT, f"{TOKEN_HEADER}: {problem}", field=TOKEN_HEADER)


def declined(problem: str) -> CallerError:
    """The error for a valid token that is not executed here. A GET then answers with the body."""
    return CallerError(ErrorCode.NOT_IMPLEMENTED, f"{TOKEN_HEADER}: {problem}", field=TOKEN_HEADER)


def is_declined(error: CallerError) -> bool:
    """Whether the error is one that `declined` makes."""
    return error.code is ErrorCode.NOT_IMPLEMENTED and error.field == TOKEN_HEADER
