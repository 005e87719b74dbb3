"""One authenticated request in hand: what operations need to answer it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.storage_api import StorageApi
from gateway.request import S3Request
from gateway.sigv4 import Claim

CONTINUED = web.RequestKey("continued", bool)


def expects_continue(http: web.BaseRequest) -> bool:
    """Whether the client holds its body back until it is told to go on."""
    return http.headers.get("Expect", "").lower() == "100-continue"


@dataclass(frozen=True, slots=True)
class Call:
    """`request` is what was asked, `http` where its body comes from and the answer goes."""

    request: S3Request
    http: web.BaseRequest
    claim: Claim
    storage: StorageApi
    trace_id: str

    async def body(self, nbytes_max: int) -> bytes:
        """The whole body, its signed SHA-256 checked.

        Raises CallerError: EntityTooLarge, InvalidRequest (the body was not signed), XAmzContentSHA256Mismatch.
        """
        expected = self.claim.body_sha256
        if expected is None:
            raise CallerError(
                ErrorCode.INVALID_REQUEST,
                "this request's body must be signed: x-amz-content-sha256 must be its SHA-256",
                field="x-amz-content-sha256",
            )
        data = bytearray()
        async for piece in self.pieces():
            data += piece
            if len(data) > nbytes_max:
                raise CallerError(
                    ErrorCode.ENTITY_TOO_LARGE, f"the body may have {nbytes_max} bytes", field="content-length"
                )
        if hashlib.sha256(data).hexdigest() != expected:
            raise CallerError(
                ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH,
                "the body's SHA-256 is not the one that was signed",
                field="x-amz-content-sha256",
            )
        return bytes(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises CallerError(IncompleteBody) when the connection ends early.

        A client that waits for `100 Continue` gets it here, when the request has been found worth its body.
        """
        if expects_continue(self.http) and CONTINUED not in self.http:
            self.http[CONTINUED] = True
            await self.http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.http.writer.output_size = 0  # the answer proper has not begun
        try:
            async for piece in self.http.content.iter_any():
                yield piece
        except (web.RequestPayloadError, ConnectionError) as error:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body ended early", field="body") from error
