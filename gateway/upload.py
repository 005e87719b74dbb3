"""What a request's headers say of its body: length, form, and what it must hash to. Pure."""

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
from gateway.payload_form import PayloadForm
from gateway.request import S3Request

DECODED_LENGTH = "x-amz-decoded-content-length"
TRAILER = "x-amz-trailer"
_DESCRIBING = frozenset({"algorithm", "mode", "type"})
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
    """`nbytes` of decoded body (None: not said); `checksum` is asked for, `digests` are known before the body and
    `trailer` brings the checksum after it.
    """

    form: PayloadForm
    nbytes: int | None
    checksum: ChecksumAlgorithm | None
    digests: BodyDigests
    trailer: ChecksumAlgorithm | None

    @property
    def trailer_names(self) -> frozenset[str] | None:
        """The trailers the body must bring; None where its form has none."""
        if not self.form.has_trailer:
            return None
        return frozenset() if self.trailer is None else frozenset({self.trailer.header})


def plan_body(request: S3Request, form: PayloadForm, sha256: str | None) -> BodyPlan:
    """Raises CallerError: MissingContentLength, InvalidDigest, InvalidRequest, NotImplemented."""
    headers = request.headers
    given = _given_checksum(headers)
    trailer = _announced_trailer(headers, form)
    if given is not None and trailer is not None:
        _invalid("a checksum goes into a header or a trailer, not both", TRAILER)
    algorithm = given or trailer
    checksum = _requested(headers, algorithm)
    value = None if given is None else decode_checksum(given, headers[given.header])
    digests = BodyDigests(sha256=sha256, md5=_content_md5(headers.get("content-md5")), checksum=value)
    return BodyPlan(form, _decoded_bytes(request, form), checksum, digests, trailer)


def plan_document(request: S3Request, form: PayloadForm, sha256: str | None) -> BodyPlan:
    """As `plan_body`, for a body that is a document about an object; the checksum headers of a
    CompleteMultipartUpload are the object's, so they say nothing of its body.
    """
    if request.method == "POST" and "uploadId" in request.parameters:
        rest = {name: value for name, value in request.headers.items() if not name.startswith(_CHECKSUM_PREFIX)}
        request = S3Request(request.method, request.path, request.query, rest)
    return plan_body(request, form, sha256)


def decode_checksum(algorithm: ChecksumAlgorithm, text: str) -> str:
    """The checksum in canonical base64. Raises CallerError(InvalidRequest)."""
    try:
        digest = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != _CHECKSUM_BYTES[algorithm]:
        _invalid(f"Value for {algorithm.header} header is invalid.", algorithm.header)
    return base64.b64encode(digest).decode()


def checksum_of(algorithm: ChecksumAlgorithm, data: bytes) -> str:
    """The checksum as S3 writes it: base64, big-endian."""
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
    """Raises CallerError: XAmzContentSHA256Mismatch, BadDigest."""
    if digests.sha256 is not None and hashlib.sha256(data).hexdigest() != digests.sha256:
        raise CallerError(
            ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH,
            "the body's SHA-256 is not the one that was signed",
            field="x-amz-content-sha256",
        )
    if digests.md5 is not None and hashlib.md5(data, usedforsecurity=False).hexdigest() != digests.md5:
        raise CallerError(ErrorCode.BAD_DIGEST, "the body's MD5 is not the one in Content-MD5", field="content-md5")
    if checksum is not None and digests.checksum not in (None, checksum_of(checksum, data)):
        raise CallerError(
            ErrorCode.BAD_DIGEST, f"the {checksum.value} you specified did not match the body", field=checksum.header
        )


def _decoded_bytes(request: S3Request, form: PayloadForm) -> int | None:
    decoded = request.number(DECODED_LENGTH)
    if not form.is_chunked:
        encoded = request.content_length
        if encoded is not None and decoded not in (None, encoded):
            _invalid("x-amz-decoded-content-length goes with an aws-chunked body", DECODED_LENGTH)
        return decoded if encoded is None else encoded
    if decoded is None:
        problem = "x-amz-decoded-content-length is required with an aws-chunked body"
        raise CallerError(ErrorCode.MISSING_CONTENT_LENGTH, problem, field=DECODED_LENGTH)
    return decoded


def _given_checksum(headers: Mapping[str, str]) -> ChecksumAlgorithm | None:
    names = [name for name in headers if name.startswith(_CHECKSUM_PREFIX)]
    names = [name for name in names if name.removeprefix(_CHECKSUM_PREFIX) not in _DESCRIBING]
    for name in names:
        if name not in _BY_HEADER:
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, f"{name} is not implemented", field=name)
    if len(names) > 1:
        problem = "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed."
        _invalid(problem, sorted(names)[1])
    return _BY_HEADER[names[0]] if names else None


def _announced_trailer(headers: Mapping[str, str], form: PayloadForm) -> ChecksumAlgorithm | None:
    text = headers.get(TRAILER)
    if text is None:
        return None
    names = [name.strip().lower() for name in text.split(",")]
    if len(names) > 1:
        _invalid("one checksum trailer may be announced", TRAILER)
    if names[0] not in _BY_HEADER:
        _invalid("The value specified in the x-amz-trailer header is not supported", TRAILER)
    if not form.has_trailer:
        _invalid("x-amz-trailer needs a body with trailers, which x-amz-content-sha256 must say", TRAILER)
    return _BY_HEADER[names[0]]


def _requested(headers: Mapping[str, str], given: ChecksumAlgorithm | None) -> ChecksumAlgorithm | None:
    """The algorithm the request asks for, which must be the one it brings a value of, where it does."""
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
    try:
        digest = base64.b64decode(header, validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != 16:
        raise CallerError(ErrorCode.INVALID_DIGEST, "Content-MD5 is no base64 MD5", field="content-md5")
    return digest.hex()


def _invalid(problem: str, field: str) -> NoReturn:
    raise CallerError(ErrorCode.INVALID_REQUEST, problem, field=field)
