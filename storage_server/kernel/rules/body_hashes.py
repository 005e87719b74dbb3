"""The hashes of a body, computed while it is written and compared with those its sender stated. Multipart checksums."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from awscrt import checksums

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests, Checksum, ChecksumAlgorithm, ChecksumType
from descriptors.storage_api import Piece


class _Hash(Protocol):
    def update(self, piece: Piece, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc:
    """A CRC with hashlib's interface; the digest is big-endian, as S3 writes it."""

    def __init__(self, function: Callable[[Piece, int], int], nbytes: int) -> None:
        self._function = function
        self._nbytes = nbytes
        self._value = 0

    def update(self, piece: Piece) -> None:
        self._value = self._function(piece, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._nbytes, "big")


_NEW: dict[ChecksumAlgorithm, Callable[[], _Hash]] = {
    ChecksumAlgorithm.CRC32: lambda: _Crc(checksums.crc32, 4),
    ChecksumAlgorithm.CRC32C: lambda: _Crc(checksums.crc32c, 4),
    ChecksumAlgorithm.CRC64NVME: lambda: _Crc(checksums.crc64nvme, 8),
    ChecksumAlgorithm.SHA1: hashlib.sha1,
    ChecksumAlgorithm.SHA256: hashlib.sha256,
}
_COMBINE: dict[ChecksumAlgorithm, tuple[Callable[[int, int, int], int], int]] = {
    ChecksumAlgorithm.CRC32: (checksums.combine_crc32, 4),
    ChecksumAlgorithm.CRC32C: (checksums.combine_crc32c, 4),
    ChecksumAlgorithm.CRC64NVME: (checksums.combine_crc64nvme, 8),
}


class BodyHashes:
    """The MD5 (it is the ETag), the signed SHA-256 where there may be one, and the checksum asked for. `md5` False is
    for bytes that are proved in another way, whose ETag is known.
    """

    def __init__(self, algorithm: ChecksumAlgorithm | None, *, sha256: bool, md5: bool = True) -> None:
        self._algorithm = algorithm
        self._md5 = hashlib.md5(usedforsecurity=False) if md5 else None
        self._sha256 = hashlib.sha256() if sha256 else None
        self._checksum = _NEW[algorithm]() if algorithm is not None else None

    def update(self, piece: Piece) -> None:
        """Add the next bytes."""
        if self._md5 is not None:
            self._md5.update(piece)
        if self._sha256 is not None:
            self._sha256.update(piece)
        if self._checksum is not None:
            self._checksum.update(piece)

    @property
    def etag(self) -> str:
        """The MD5 in hex; empty without one."""
        return "" if self._md5 is None else self._md5.hexdigest()

    @property
    def checksum(self) -> Checksum | None:
        """The checksum that was asked for; None where none was."""
        if self._checksum is None or self._algorithm is None:
            return None
        return Checksum(self._algorithm, base64.b64encode(self._checksum.digest()).decode())

    def check(self, said: BodyDigests) -> None:
        """Raises CallerError (XAmzContentSHA256Mismatch, BadDigest) when the body has other digests than stated."""
        if said.sha256 is not None and (self._sha256 is None or self._sha256.hexdigest() != said.sha256):
            raise CallerError(
                ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH,
                "The provided 'x-amz-content-sha256' header does not match what was computed.",
                field="x-amz-content-sha256",
            )
        if said.md5 is not None and self.etag != said.md5:
            raise CallerError(
                ErrorCode.BAD_DIGEST,
                "The Content-MD5 you specified did not match what we received.",
                field="content-md5",
            )
        own = self.checksum
        if said.checksum is not None and own is not None and own.value != said.checksum:
            raise CallerError(
                ErrorCode.BAD_DIGEST,
                f"The {own.algorithm.value} you specified did not match the calculated checksum.",
                field=own.algorithm.header,
            )


def multipart_etag(part_etags: Sequence[str]) -> str:
    """The ETag of a multipart object: the MD5 of its parts' MD5s, and the number of parts."""
    joined = b"".join(bytes.fromhex(etag) for etag in part_etags)
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(part_etags)}"


def multipart_checksum(algorithm: ChecksumAlgorithm, kind: ChecksumType, parts: Iterable[tuple[str, int]]) -> Checksum:
    """The object's checksum from its parts' (base64, bytes): over the parts' checksums, or over all bytes (CRCs)."""
    values = [(base64.b64decode(value), nbytes) for value, nbytes in parts]
    if kind is ChecksumType.COMPOSITE:
        whole = _NEW[algorithm]()
        for digest, _ in values:
            whole.update(digest)
        return Checksum(algorithm, f"{base64.b64encode(whole.digest()).decode()}-{len(values)}", kind)
    combine, width = _COMBINE[algorithm]
    crc = 0
    for digest, nbytes in values:
        crc = combine(crc, int.from_bytes(digest, "big"), nbytes)
    return Checksum(algorithm, base64.b64encode(crc.to_bytes(width, "big")).decode(), kind)
