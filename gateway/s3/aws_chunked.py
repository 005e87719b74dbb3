"""aws-chunked bodies: bytes in, pieces of the object out. Knows no sockets.

    body    = *chunk last-chunk [trailers] CRLF
    chunk   = size-in-hex *(";" name "=" value) CRLF data CRLF
    trailer = name ":" value LF-or-CRLF

Source: S3 API reference, "Signature Calculations for the Authorization Header: Transferring Payload in Multiple
Chunks", with and without trailers. Kept here:

* However the bytes are split, the pieces joined, the trailers and the error are the same.
* A piece is a view of the bytes fed, never a copy. It comes before its chunk's signature: nothing may be published
  until `finish` has returned.
* Nothing is kept but a chunk header, or the trailers, both bounded. Chunks never exceed the announced length.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator
from enum import Enum, auto

from descriptors.errors import CallerError, ErrorCode

CHUNK_HEADER_BYTES_MAX = 1024
TRAILER_BYTES_MAX = 8192
SIGNATURE_EXTENSION = b"chunk-signature"
SIGNATURE_TRAILER = "x-amz-trailer-signature"
_BLANKS = b" \t"
_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}\Z")
_TRAILER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,128}\Z")
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class SignatureChain:
    """The signatures of chunks and trailer: each covers the one before, the first the request's own."""

    def __init__(self, signing_key: bytes, date: str, scope: str, seed: str) -> None:
        self._key = signing_key
        self._date = date
        self._scope = scope
        self._previous = seed

    def chunk(self, data_sha256: str) -> str:
        """The next chunk's signature."""
        return self._next("AWS4-HMAC-SHA256-PAYLOAD", f"{_EMPTY_SHA256}\n{data_sha256}")

    def trailer(self, trailers_sha256: str) -> str:
        """The trailers' signature, after the last chunk's."""
        return self._next("AWS4-HMAC-SHA256-TRAILER", trailers_sha256)

    def _next(self, algorithm: str, hashed: str) -> str:
        text = "\n".join((algorithm, self._date, self._scope, self._previous, hashed))
        self._previous = hmac.digest(self._key, text.encode(errors="surrogateescape"), "sha256").hex()
        return self._previous


class _State(Enum):
    HEADER = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILERS = auto()


class ChunkedDecoder:
    """Decodes one body of `nbytes` decoded bytes.

    `chain` is None where chunks are not signed. `trailer_names` are the trailers announced, lower-case; None where the
    form has no trailers.
    """

    def __init__(self, nbytes: int, chain: SignatureChain | None, trailer_names: frozenset[str] | None) -> None:
        self._nbytes = nbytes
        self._chain = chain
        self._trailer_names = trailer_names
        self._state = _State.HEADER
        self._kept = bytearray()
        self._decoded = 0
        self._chunk_index = 0
        self._chunk_left = 0
        self._signature = b""
        self._hash = hashlib.sha256()

    def feed(self, data: bytes | memoryview) -> Iterator[memoryview]:
        """Object bytes, as views into `data`; iterate to the end before the next call.

        Raises CallerError: IncompleteBody for bad framing, when chunks exceed the announced length and when the last
        one comes too early, SignatureDoesNotMatch, MalformedTrailerError when the trailers are too long.
        """
        view = memoryview(data)
        at = 0
        while at < len(view):
            if self._state is _State.DATA:
                piece = view[at : at + self._chunk_left]
                at += len(piece)
                self._take(piece)
                yield piece
            elif self._state is _State.HEADER:
                at += self._keep_line(view[at:])
            elif self._state is _State.DATA_END:
                at += self._keep_data_end(view[at:])
            else:
                self._keep_trailers(view[at:])
                return

    def finish(self) -> dict[str, str]:
        """The trailers, after the last byte was fed.

        Raises CallerError: IncompleteBody, MalformedTrailerError, SignatureDoesNotMatch.
        """
        if self._state is not _State.TRAILERS:
            raise CallerError(
                ErrorCode.INCOMPLETE_BODY,
                f"the body ended before its last chunk, after {self._decoded} of {self._nbytes} bytes",
                field="body",
            )
        if self._trailer_names is None:
            if bytes(self._kept) not in (b"", b"\r\n"):
                raise self._malformed("bytes follow the last chunk")
            return {}
        return self._read_trailers(self._trailer_names)

    def _take(self, piece: memoryview) -> None:
        if self._chain is not None:
            self._hash.update(piece)
        self._chunk_left -= len(piece)
        self._decoded += len(piece)
        if not self._chunk_left:
            self._state = _State.DATA_END

    def _keep_line(self, view: memoryview) -> int:
        """Keep bytes of a chunk header; how many were taken."""
        room = CHUNK_HEADER_BYTES_MAX + 1 - len(self._kept)
        head = bytes(view[:room])
        end = head.find(b"\n")
        taken = len(head) if end < 0 else end + 1
        self._kept += head[:taken]
        if end >= 0:
            line = bytes(self._kept)
            self._kept.clear()
            self._begin_chunk(line)
        elif len(self._kept) > CHUNK_HEADER_BYTES_MAX:
            raise self._malformed(f"has a header longer than {CHUNK_HEADER_BYTES_MAX} bytes")
        return taken

    def _begin_chunk(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise self._malformed("has a header that does not end in CRLF")
        text, *extensions = (part.strip(_BLANKS) for part in line[:-2].split(b";"))
        if not _SIZE.match(text):
            raise self._malformed("has no size in hex")
        size = int(text, 16)
        if size > self._nbytes - self._decoded:
            raise CallerError(
                ErrorCode.INCOMPLETE_BODY,
                f"the chunks have more than the {self._nbytes} bytes x-amz-decoded-content-length says",
                field="x-amz-decoded-content-length",
            )
        self._chunk_left = size
        self._signature = next(
            (
                value.strip(_BLANKS)
                for name, _, value in (part.partition(b"=") for part in extensions)
                if name.strip(_BLANKS) == SIGNATURE_EXTENSION
            ),
            b"",
        )
        if self._chain is not None and not self._signature:
            raise self._malformed("has no chunk-signature")
        if size:
            self._state = _State.DATA
            return
        self._check_signature()
        if self._decoded != self._nbytes:
            raise CallerError(
                ErrorCode.INCOMPLETE_BODY,
                f"the chunks have {self._decoded} bytes, x-amz-decoded-content-length says {self._nbytes}",
                field="x-amz-decoded-content-length",
            )
        self._state = _State.TRAILERS

    def _keep_data_end(self, view: memoryview) -> int:
        head = bytes(view[: 2 - len(self._kept)])
        self._kept += head
        if not b"\r\n".startswith(self._kept):
            raise self._malformed("is longer than its size says")
        if len(self._kept) == 2:
            self._kept.clear()
            self._check_signature()
            self._chunk_index += 1
            self._state = _State.HEADER
        return len(head)

    def _check_signature(self) -> None:
        if self._chain is None:
            return
        expected = self._chain.chunk(self._hash.hexdigest())
        self._hash = hashlib.sha256()
        if not hmac.compare_digest(expected.encode(), self._signature):
            raise self._mismatch(f"the signature of chunk {self._chunk_index} does not match")

    def _keep_trailers(self, view: memoryview) -> None:
        limit = 2 if self._trailer_names is None else TRAILER_BYTES_MAX
        self._kept += view[: limit + 1 - len(self._kept)]
        if len(self._kept) > limit:
            if self._trailer_names is None:
                raise self._malformed("bytes follow the last chunk")
            raise _malformed_trailer(f"the trailers are longer than {TRAILER_BYTES_MAX} bytes")

    def _read_trailers(self, names: frozenset[str]) -> dict[str, str]:
        found = _parse_trailers(bytes(self._kept))
        signature = found.pop(SIGNATURE_TRAILER, None) if self._chain is not None else None
        for name in sorted(names ^ set(found)):
            raise _malformed_trailer(
                f"the trailer {name} is {'missing' if name in names else 'not announced in x-amz-trailer'}"
            )
        if self._chain is not None and (found or signature is not None):
            text = "".join(f"{name}:{value}\n" for name, value in found.items())
            expected = self._chain.trailer(hashlib.sha256(text.encode()).hexdigest())
            if signature is None:
                raise _cut_short(f"the trailer {SIGNATURE_TRAILER} is missing")
            if not hmac.compare_digest(expected.encode(), signature.encode()):
                raise self._mismatch("the trailers' signature does not match")
        return found

    def _malformed(self, problem: str) -> CallerError:
        return _cut_short(f"the body is not aws-chunked: chunk {self._chunk_index} {problem}")

    def _mismatch(self, problem: str) -> CallerError:
        return CallerError(ErrorCode.SIGNATURE_DOES_NOT_MATCH, problem, field="body")


def _parse_trailers(section: bytes) -> dict[str, str]:
    """Some clients end a trailer with LF, some with CRLF, some with both; blank lines say nothing."""
    if section and not section.endswith(b"\n"):
        raise _cut_short("the trailers end within a line")
    try:
        text = section.decode("ascii")
    except UnicodeError:
        raise _malformed_trailer("the trailers are not ASCII") from None
    found: dict[str, str] = {}
    for line in text.replace("\r\n", "\n").split("\n"):
        if not line:
            continue
        name, colon, value = line.partition(":")
        name = name.strip().lower()
        if not colon or not _TRAILER_NAME.match(name) or name in found:
            raise _malformed_trailer("a trailer must be name:value, each name once")
        found[name] = value.strip()
    return found


def _cut_short(problem: str) -> CallerError:
    """S3's answer to every body whose chunks do not add up."""
    return CallerError(ErrorCode.INCOMPLETE_BODY, problem, field="body")


def _malformed_trailer(problem: str) -> CallerError:
    return CallerError(ErrorCode.MALFORMED_TRAILER, problem, field="x-amz-trailer")
