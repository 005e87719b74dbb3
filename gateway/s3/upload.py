"""The headers of a request about its body: length, form, and digests. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from awscrt import checksums

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests, ChecksumAlgorithm
from gateway.s3.payload_form import PayloadForm
from gateway.s3.request import S3Request

DECODED_LENGTH = "x-amz-decoded-content-length"
LENGTH_NEEDED = "You must provide the Content-Length HTTP header."
TRAILER = "x-amz-trailer"
SINGLE_CHECKSUM = "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed."
_DESCRIBING = frozenset({"algorithm", "mode", "type"})
_NOT_HERE = frozenset({"md5", "sha512", "xxhash3", "xxhash64", "xxhash128"})
"""Checksums that S3 has and this server lacks. Any other name is not a checksum of S3."""
_CHECKSUM_PREFIX = "x-amz-checksum-"
_CHECKSUM_BYTES = {
    ChecksumAlgorithm.CRC32: 4,
    ChecksumAlgorithm.CRC32C: 4,
    ChecksumAlgorithm.CRC64NVME: 8,
    ChecksumAlgorithm.SHA1: 20,
    ChecksumAlgorithm.SHA256: 32,
}
_BY_HEADER = {algorithm.header: algorithm for algorithm in ChecksumAlgorithm}


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """A request's body before it is read: `nbytes` when decoded (None: not stated). `checksum` is to be computed.
    `digests` come in headers, and `trailer` is the checksum that comes behind the body.
    """

    form: PayloadForm
    nbytes: int | None
    checksum: ChecksumAlgorithm | None
    digests: BodyDigests
    trailer: ChecksumAlgorithm | None

    @property
    def trailer_names(self) -> frozenset[str] | None:
        """The names of the trailers that the body must have; None where the body's form has no trailers."""
        if not self.form.has_trailer:
            return None
        return frozenset() if self.trailer is None else frozenset({self.trailer.header})


def plan_body(request: S3Request, form: PayloadForm, sha256: str | None) -> BodyPlan:
    """The plan for an object's bytes. Raises CallerError: MissingContentLength, InvalidDigest, InvalidRequest,
    MalformedTrailerError, NotImplemented.
    """
    headers = request.headers
    given = given_checksum(headers)
    trailer = announced_trailer(headers)
    if given is not None and trailer is not None:
        _invalid("Expecting a single x-amz-checksum- header", TRAILER)
    if trailer is not None and not form.has_trailer:
        problem = "x-amz-trailer needs a body with trailers, which x-amz-content-sha256 must say"
        raise CallerError(ErrorCode.MALFORMED_TRAILER, problem, field=TRAILER)
    algorithm = given or trailer
    checksum = _requested(headers, algorithm)
    value = None if given is None else decode_checksum(given, headers[given.header])
    digests = BodyDigests(sha256=sha256, md5=_content_md5(headers.get("content-md5")), checksum=value)
    return BodyPlan(form, _decoded_bytes(request, form), checksum, digests, trailer)


def plan_document(request: S3Request, form: PayloadForm, sha256: str | None) -> BodyPlan:
    """The plan for a document about an object. The checksum headers of a CompleteMultipartUpload belong to the object,
    so they do not describe the document. Raises what `plan_body` raises.
    """
    if request.method == "POST" and "uploadId" in request.parameters:
        rest = {name: value for name, value in request.headers.items() if not name.startswith(_CHECKSUM_PREFIX)}
        request = S3Request(request.method, request.path, request.query, rest)
    return plan_body(request, form, sha256)


def decode_checksum(algorithm: ChecksumAlgorithm, text: str) -> str:
    """The checksum, which must be in canonical base64. Raises CallerError(InvalidRequest)."""
    digest = _digest(text)
    if len(digest) != _CHECKSUM_BYTES[algorithm]:
        _invalid(f"Value for {algorithm.header} header is invalid.", algorithm.header)
    return text


def checksum_of(algorithm: ChecksumAlgorithm, data: bytes) -> str:
    """The checksum in S3's form: base64 of the big-endian value."""
    match algorithm:
        case ChecksumAlgorithm.SHA1:
            digest = hashlib.sha1(data, usedforsecurity=False).digest()
        case ChecksumAlgorithm.SHA256:
            digest = hashlib.sha256(data).digest()
        case ChecksumAlgorithm.CRC32:
            digest = checksums.crc32(data).to_bytes(4, "big")
        case ChecksumAlgorithm.CRC32C:
            digest = checksums.crc32c(data).to_bytes(4, "big")
        case ChecksumAlgorithm.CRC64NVME:
            digest = checksums.crc64nvme(data).to_bytes(8, "big")
    return base64.b64encode(digest).decode()


def check_digests(data: bytes, checksum: ChecksumAlgorithm | None, digests: BodyDigests) -> None:
    """Compare the digests of a whole body. Raises CallerError: XAmzContentSHA256Mismatch, BadDigest."""
    if digests.sha256 is not None and hashlib.sha256(data).hexdigest() != digests.sha256:
        raise CallerError(
            ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH,
            "The provided 'x-amz-content-sha256' header does not match what was computed.",
            field="x-amz-content-sha256",
        )
    if digests.md5 is not None and hashlib.md5(data, usedforsecurity=False).hexdigest() != digests.md5:
        problem = "The Content-MD5 you specified did not match what we received."
        raise CallerError(ErrorCode.BAD_DIGEST, problem, field="content-md5")
    if checksum is not None and digests.checksum not in (None, checksum_of(checksum, data)):
        problem = f"The {checksum.value} you specified did not match the calculated checksum."
        raise CallerError(ErrorCode.BAD_DIGEST, problem, field=checksum.header)


def _decoded_bytes(request: S3Request, form: PayloadForm) -> int | None:
    decoded = request.number(DECODED_LENGTH)
    if not form.is_chunked:
        encoded = request.content_length
        if encoded is not None and decoded not in (None, encoded):
            _invalid("x-amz-decoded-content-length goes with an aws-chunked body", DECODED_LENGTH)
        return decoded if encoded is None else encoded
    if decoded is None:
        raise CallerError(ErrorCode.MISSING_CONTENT_LENGTH, LENGTH_NEEDED, field=DECODED_LENGTH)
    return decoded


def given_checksum(headers: Mapping[str, str]) -> ChecksumAlgorithm | None:
    """The checksum algorithm whose value a header gives. Raises CallerError: InvalidRequest, NotImplemented."""
    names = [name for name in headers if name.startswith(_CHECKSUM_PREFIX)]
    names = [name for name in names if name.removeprefix(_CHECKSUM_PREFIX) not in _DESCRIBING]
    for name in names:
        if name.removeprefix(_CHECKSUM_PREFIX) in _NOT_HERE:
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, f"{name} is not implemented", field=name)
        if name not in _BY_HEADER:
            _invalid("The algorithm type you specified in x-amz-checksum- header is invalid.", name)
    if len(names) > 1:
        _invalid(SINGLE_CHECKSUM, sorted(names)[1])
    return _BY_HEADER[names[0]] if names else None


def announced_trailer(headers: Mapping[str, str]) -> ChecksumAlgorithm | None:
    """The checksum algorithm whose value shall follow the body. Commas after its name are ignored. Raises
    CallerError(InvalidRequest).
    """
    text = headers.get(TRAILER)
    if text is None:
        return None
    names = [name.strip().lower() for name in text.strip().rstrip(",").split(",")]
    if any(name not in _BY_HEADER for name in names):
        _invalid("The value specified in the x-amz-trailer header is not supported", TRAILER)
    if len(names) > 1:
        _invalid(SINGLE_CHECKSUM, TRAILER)
    return _BY_HEADER[names[0]]


def _requested(headers: Mapping[str, str], given: ChecksumAlgorithm | None) -> ChecksumAlgorithm | None:
    """The algorithm that the request asks for. If the request also gives a value, it must be of this algorithm."""
    for name in ("x-amz-sdk-checksum-algorithm", f"{_CHECKSUM_PREFIX}algorithm"):
        text = headers.get(name)
        if text is None:
            continue
        if text.upper() not in ChecksumAlgorithm.__members__:
            _invalid(f"Value for {name} header is invalid.", name)
        asked = ChecksumAlgorithm[text.upper()]
        if given is not None and asked is not given:
            _invalid(f"Value for {name} header is invalid.", name)
        if given is None and name == "x-amz-sdk-checksum-algorithm":
            problem = f"{name} specified, but no corresponding x-amz-checksum-* or x-amz-trailer headers were found."
            _invalid(problem, name)
        return asked
    return given


def _content_md5(header: str | None) -> str | None:
    if header is None:
        return None
    digest = _digest(header)
    if len(digest) != 16:
        raise CallerError(ErrorCode.INVALID_DIGEST, "The Content-MD5 you specified was invalid.", field="content-md5")
    return digest.hex()


def _digest(text: str) -> bytes:
    """The bytes of canonical base64, whose unused bits are zero; no bytes for any other text."""
    try:
        digest = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
    return digest if base64.b64encode(digest).decode() == text else b""


def _invalid(problem: str, field: str) -> NoReturn:
    raise CallerError(ErrorCode.INVALID_REQUEST, problem, field=field)
