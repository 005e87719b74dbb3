"""The form of a body, which `x-amz-content-sha256` gives: how the body is coded, and what of it is signed. Pure."""

from __future__ import annotations

import re
from enum import Enum

from descriptors.errors import CallerError, ErrorCode

_SHA256_HEX = re.compile(r"[0-9a-fA-F]{64}\Z")
_ASYMMETRIC = "STREAMING-AWS4-ECDSA-"


class PayloadForm(Enum):
    """The form, by its name in the header. For a body that is signed whole the header holds the digest instead."""

    SIGNED = "SHA256"
    UNSIGNED = "UNSIGNED-PAYLOAD"
    SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    SIGNED_CHUNKS_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
    UNSIGNED_CHUNKS_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"

    @property
    def is_chunked(self) -> bool:
        """Whether the body is aws-chunked."""
        return self not in (PayloadForm.SIGNED, PayloadForm.UNSIGNED)

    @property
    def is_signed(self) -> bool:
        """Whether a signature covers the body's bytes."""
        return self not in (PayloadForm.UNSIGNED, PayloadForm.UNSIGNED_CHUNKS_TRAILER)

    @property
    def has_trailer(self) -> bool:
        """Whether trailing headers follow the last chunk."""
        return self in (PayloadForm.SIGNED_CHUNKS_TRAILER, PayloadForm.UNSIGNED_CHUNKS_TRAILER)


_NAMED = {form.value: form for form in PayloadForm if form is not PayloadForm.SIGNED}


def payload_form(payload_hash: str) -> PayloadForm:
    """The form that the header gives. Raises CallerError: NotImplemented for SigV4A chunks, InvalidArgument for a value
    that is neither a form nor a digest.
    """
    form = _NAMED.get(payload_hash)
    if form is not None:
        return form
    if _SHA256_HEX.match(payload_hash):
        return PayloadForm.SIGNED
    if payload_hash.startswith(_ASYMMETRIC):
        raise CallerError(
            ErrorCode.NOT_IMPLEMENTED, "SigV4A signatures are not implemented", field="x-amz-content-sha256"
        )
    raise CallerError(
        ErrorCode.INVALID_ARGUMENT,
        "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-UNSIGNED-PAYLOAD-TRAILER,"
        " STREAMING-AWS4-HMAC-SHA256-PAYLOAD, STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER or a valid sha256 value.",
        field="x-amz-content-sha256",
    )
