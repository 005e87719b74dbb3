"""An object in an HTML form, on its way: the form's fields are read first, then its file, as the body of an object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests
from descriptors.storage_api import Piece
from descriptors.units import KIB, MIB
from gateway.body import arriving
from gateway.s3.form import FILE_FIELD, FORM_TYPE, FileReader, FormHead, HeadReader, boundary_of
from gateway.s3.request import S3Request
from gateway.s3.upload import LENGTH_NEEDED
from gateway.settings import GatewaySettings
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.phases import Phases

HELD_BYTES_MAX = 16 * MIB
"""A file of at most so much is held in memory until its end is seen: a browser does not say how long a file is, and
other fields may follow it. A larger file must be the last field.
"""
PIECE_BYTES = 256 * KIB
LEAST_BYTES_PER_S = 64 * KIB
"""At this rate a file that is held must come; the time for a document is added."""


def is_form_upload(request: S3Request) -> bool:
    """Whether this is an upload by HTML form, whose signature is among the form's fields."""
    return (
        request.method == "POST"
        and bool(request.bucket)
        and not request.key
        and not request.query
        and "authorization" not in request.headers
        and request.headers.get("content-type", "").lower().startswith(FORM_TYPE)
    )


@dataclass(frozen=True, slots=True)
class FormFile:
    """The file of a form, with its length. Iterating over `pieces` raises CallerError: MalformedPOSTRequest,
    InvalidArgument, IncompleteBody, RequestTimeout.
    """

    nbytes: int
    pieces: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class FormBody:
    """Implements descriptors.storage_api.Body over a form's file."""

    file: FormFile
    said: BodyDigests
    has_sha256 = False
    is_held_back = False

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self.file.pieces

    def digests(self) -> BodyDigests:
        """The checksum that a field of the form states."""
        return self.said


class FormUpload:
    """A form whose fields have arrived, and whose file has begun. `fields` have their names in small letters."""

    def __init__(self, head: FormHead, reader: FileReader, arriving: AsyncIterator[bytes], rest_bytes: int) -> None:
        self._head = head
        self._reader = reader
        self._arriving = arriving
        self._rest_bytes = rest_bytes
        self.fields: Mapping[str, str] = head.fields

    @classmethod
    async def begun(
        cls, http: web.BaseRequest, request: S3Request, settings: GatewaySettings, phases: Phases
    ) -> FormUpload:
        """Read the fields of a form up to its file. Raises CallerError: MissingContentLength, MalformedPOSTRequest,
        MaxPostPreDataLengthExceededError, IncorrectNumberOfFilesInPostRequest, InvalidArgument, IncompleteBody,
        RequestTimeout.
        """
        body_bytes = request.content_length
        if body_bytes is None:
            raise CallerError(ErrorCode.MISSING_CONTENT_LENGTH, LENGTH_NEEDED, field="content-length")
        boundary = boundary_of(request.headers["content-type"])
        reader, pieces = HeadReader(boundary), arriving(http, settings.body_idle_timeout_s, phases)
        head = None
        try:
            async with asyncio.timeout(settings.document_timeout_s):
                while head is None:
                    head = reader.add(await anext(pieces))
        except StopAsyncIteration:
            problem = "POST requires exactly one file upload per request."
            raise CallerError(ErrorCode.INCORRECT_NUMBER_OF_FILES, problem, field=FILE_FIELD) from None
        except TimeoutError:
            problem = f"the fields before the file did not arrive within {settings.document_timeout_s:g} s"
            raise CallerError(ErrorCode.REQUEST_TIMEOUT, problem, field="body") from None
        return cls(head, FileReader(boundary), _behind(reader.rest, pieces), body_bytes - head.nbytes)

    @property
    def file_name(self) -> str:
        """The name that the browser gives the file, without folders."""
        return self._head.file_name.rpartition("/")[2].rpartition("\\")[2]

    @asynccontextmanager
    async def file(
        self, access_key: str, budget: DocumentBudget, settings: GatewaySettings, most_bytes: int | None
    ) -> AsyncIterator[FormFile]:
        """The file, with its length: a small one has arrived, and is held in memory until the block ends; of one that
        is larger than `most_bytes` no more is held than shows it. Raises CallerError: MalformedPOSTRequest,
        IncompleteBody, RequestTimeout; ServerError(SlowDown).
        """
        if self._rest_bytes > HELD_BYTES_MAX:
            nbytes = self._rest_bytes - self._reader.end_bytes
            yield FormFile(nbytes, self._only(nbytes))
            return
        held = bytearray()
        limit_s = settings.document_timeout_s + self._rest_bytes / LEAST_BYTES_PER_S
        try:
            try:
                async with asyncio.timeout(limit_s):
                    async for piece in self._all():
                        budget.take(access_key, len(piece))
                        held += piece
                        if most_bytes is not None and len(held) > most_bytes:
                            break
            except TimeoutError:
                problem = f"the file did not arrive within {limit_s:.0f} s"
                raise CallerError(ErrorCode.REQUEST_TIMEOUT, problem, field="body") from None
            yield FormFile(len(held), _pieces_of(memoryview(held)))
        finally:
            budget.give_back(access_key, len(held))

    async def _all(self) -> AsyncIterator[bytes]:
        """The bytes of the file. The parts that follow it are read and ignored."""
        async for data in self._arriving:
            piece = self._reader.feed(data)
            if piece:
                yield piece
        if not self._reader.has_ended:
            problem = "the body of your POST request ends within its file"
            raise CallerError(ErrorCode.MALFORMED_POST_REQUEST, problem, field=FILE_FIELD)

    async def _only(self, nbytes: int) -> AsyncIterator[bytes]:
        """The bytes of a file that has `nbytes` if no other field follows it."""
        found_bytes = 0
        async for piece in self._all():
            found_bytes += len(piece)
            if found_bytes > nbytes:
                break
            yield piece
        if found_bytes != nbytes:
            problem = f"in a form of more than {HELD_BYTES_MAX} bytes the file must be the last field"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=FILE_FIELD)


async def _behind(rest: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if rest:
        yield rest
    async for piece in pieces:
        yield piece


async def _pieces_of(held: memoryview) -> AsyncIterator[bytes]:
    for start in range(0, len(held), PIECE_BYTES):
        yield bytes(held[start : start + PIECE_BYTES])
