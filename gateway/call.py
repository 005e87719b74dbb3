"""Call: one authenticated request, with everything that an operation needs to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ChecksumAlgorithm
from descriptors.storage_api import StorageApi
from gateway.body import RequestBody
from gateway.form_upload import FormUpload
from gateway.s3.aws_chunked import SignatureChain
from gateway.s3.credentials import NOBODY, Credential
from gateway.s3.payload_form import PayloadForm
from gateway.s3.request import S3Request
from gateway.s3.routing import Operation
from gateway.s3.sigv4 import Claim
from gateway.s3.upload import LENGTH_NEEDED, BodyPlan, check_digests, plan_body, plan_document
from gateway.settings import GatewaySettings
from gateway.trace import RequestTrace
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.threads import parsed

_T = TypeVar("_T")
_CHAINED = (PayloadForm.SIGNED_CHUNKS, PayloadForm.SIGNED_CHUNKS_TRAILER)


@dataclass(frozen=True, slots=True)
class Upload:
    """An object's bytes in a request body: `nbytes` when decoded, and the checksum to compute and keep."""

    nbytes: int
    checksum: ChecksumAlgorithm | None
    body: RequestBody


@dataclass(frozen=True, slots=True)
class Call:
    """`request` is the parsed request; its body is read from `http`, and the answer is written there. `form` is an
    upload by HTML form, whose fields have been read; files that are held count in `held_forms`.
    """

    operation: Operation
    request: S3Request
    http: web.BaseRequest
    claim: Claim
    storage: StorageApi
    trace: RequestTrace
    documents: DocumentBudget
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    signing_key: bytes = field(default=b"", repr=False)
    credential: Credential = NOBODY
    form: FormUpload | None = None
    held_forms: DocumentBudget = field(default_factory=lambda: DocumentBudget(0, 0))

    @property
    def access_key(self) -> str:
        """The access key that signed the request."""
        return self.claim.access_key

    def bound_write_queue(self) -> None:
        """From now on a write of the answer returns only when the connection has taken the bytes."""
        transport = self.http.transport
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)

    def upload(self) -> Upload:
        """The body as an object's bytes, whatever its form. The length must be known.

        Raises CallerError: MissingContentLength, InvalidDigest, InvalidRequest. Reading the body raises what `Body`
        says, and also RequestTimeout, SignatureDoesNotMatch, MalformedTrailerError, InvalidRequest.
        """
        plan = plan_body(self.request, self.claim.form, self.claim.body_sha256)
        if plan.nbytes is None:
            raise CallerError(ErrorCode.MISSING_CONTENT_LENGTH, LENGTH_NEEDED, field="content-length")
        body = self._body(plan)
        self.trace.nbytes = plan.nbytes
        return Upload(plan.nbytes, plan.checksum, body)

    async def document(self, parse: Callable[[bytes], _T], nbytes_max: int) -> _T:
        """Read a small body whole, check every digest that the request gives, and parse it. Its memory counts in the
        gateway's budget for documents. A large document is checked and parsed in a thread.

        Raises CallerError: EntityTooLarge, XAmzContentSHA256Mismatch, BadDigest, RequestTimeout, and what `upload` and
        its body raise; ServerError(SlowDown); what `parse` raises.
        """
        plan = plan_document(self.request, self.claim.form, self.claim.body_sha256)
        if plan.nbytes is not None and plan.nbytes > nbytes_max:
            raise _too_large(nbytes_max)
        body, data = self._body(plan), bytearray()
        held_bytes = 0
        try:
            async with asyncio.timeout(self.settings.document_timeout_s):
                async for piece in body:
                    if len(data) + len(piece) > nbytes_max:
                        raise _too_large(nbytes_max)
                    self.documents.take(self.claim.access_key, len(piece))
                    held_bytes += len(piece)
                    data += piece
            whole, digests = bytes(data), body.digests()
            del data

            def proved(document: bytes) -> _T:
                check_digests(document, plan.checksum, digests)
                return parse(document)

            return await parsed(proved, whole)
        except TimeoutError:
            problem = f"the body did not arrive completely within {self.settings.document_timeout_s:g} s"
            raise CallerError(ErrorCode.REQUEST_TIMEOUT, problem, field="body") from None
        finally:
            self.documents.give_back(self.claim.access_key, held_bytes)

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Count what was made of a document for as long as it is needed: a small one may name many long keys. Raises
        ServerError(SlowDown).
        """
        self.documents.take(self.claim.access_key, nbytes)
        try:
            yield
        finally:
            self.documents.give_back(self.claim.access_key, nbytes)

    def _body(self, plan: BodyPlan) -> RequestBody:
        claim = self.claim
        chained = claim.form in _CHAINED
        chain = SignatureChain(self.signing_key, claim.date, claim.scope, claim.signature) if chained else None
        return RequestBody(self.http, plan, chain, self.settings.body_idle_timeout_s, self.trace.phases)


def _too_large(nbytes_max: int) -> CallerError:
    return CallerError(ErrorCode.ENTITY_TOO_LARGE, f"the body may have {nbytes_max} bytes", field="content-length")
