"""Query parameters and headers that many operations share: numbers, tokens, encodings, versions."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import PART_NUMBER_MAX
from gateway.s3.request import S3Request

NULL_VERSION = "null"
INTEGER_MAX = 2**31 - 1


def integer(values: Mapping[str, str], name: str, default: int, least: int = 0, most: int = INTEGER_MAX) -> int:
    """A number from query or headers. Raises CallerError(InvalidArgument)."""
    text = values.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not least <= int(text) <= most:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, f"{name} must be {least} to {most}", field=name)
    return int(text)


def part_number(values: Mapping[str, str]) -> int:
    """The partNumber parameter. Raises CallerError(InvalidArgument)."""
    text = values.get("partNumber", "")
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not 1 <= int(text) <= PART_NUMBER_MAX:
        problem = f"Part number must be an integer between 1 and {PART_NUMBER_MAX}, inclusive"
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="partNumber")
    return int(text)


def wants_url_encoding(values: Mapping[str, str]) -> bool:
    """Whether keys are to be percent-encoded. Raises CallerError(InvalidArgument)."""
    wanted = values.get("encoding-type")
    if wanted not in (None, "url"):
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "encoding-type can only be url", field="encoding-type")
    return wanted is not None


def after_token(token: str) -> str:
    """The key that a continuation token stands for. Raises CallerError(InvalidArgument)."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise CallerError(
            ErrorCode.INVALID_ARGUMENT, "the continuation token is not one of ours", field="continuation-token"
        ) from None


def check_version(request: S3Request) -> None:
    """Objects have one version, called null. Raises CallerError: NoSuchVersion, InvalidArgument."""
    version = request.parameters.get("versionId")
    if version == "":
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "a version id cannot be empty", field="versionId")
    if version not in (None, NULL_VERSION):
        raise CallerError(ErrorCode.NO_SUCH_VERSION, "the only version is null", field="versionId")
