"""The proof that an object carries upstream: the checksums of its blocks, in its metadata. With it each layer can be
proved when it comes, long before the whole object is there. Pure.

    x-amz-meta-objectcache-proof: 16384:kLbR…    the CRC-32C of each 16 KiB, little-endian words in base64

S3 allows 2 KiB of metadata, so the blocks of larger objects are joined until PROOF_WORDS_MAX checksums are enough, and
further where the caller's own metadata leaves less room.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np
from awscrt.checksums import combine_crc32c

from storage_server.planning.block_checksums import BLOCK_BYTES

HEADER = "x-amz-meta-objectcache-proof"
PROOF_WORDS_MAX = 256
UNIT_BYTES_MAX = 1 << 30
_WORD = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Proof:
    """The checksum of each `unit_bytes` of an object of `nbytes`; the last unit may be shorter."""

    nbytes: int
    unit_bytes: int
    words: tuple[int, ...]

    def header(self) -> str:
        """The value of HEADER."""
        return f"{self.unit_bytes}:{base64.b64encode(np.array(self.words, dtype=_WORD).tobytes()).decode()}"


def make_proof(nbytes: int, packed: bytes) -> Proof:
    """The proof of an object, from the packed checksums of its blocks of BLOCK_BYTES."""
    words = [int(word) for word in np.frombuffer(packed, dtype=_WORD)]
    unit_bytes = BLOCK_BYTES
    while len(words) > PROOF_WORDS_MAX:
        words = _joined(words, unit_bytes, nbytes)
        unit_bytes *= 2
    return Proof(nbytes, unit_bytes, tuple(words))


def proof_within(proof: Proof, header_bytes_max: int) -> Proof | None:
    """The finest proof of the same bytes whose header has no more bytes; None where there is no room for any."""
    while len(proof.header()) > header_bytes_max:
        if len(proof.words) == 1:
            return None
        joined = _joined(list(proof.words), proof.unit_bytes, proof.nbytes)
        proof = Proof(proof.nbytes, 2 * proof.unit_bytes, tuple(joined))
    return proof


def parse_proof(value: str | None, nbytes: int) -> Proof | None:
    """The proof of an object of `nbytes`; None where it has none that we understand."""
    unit_text, _, encoded = (value or "").partition(":")
    if not unit_text.isdecimal() or len(unit_text) > len(str(UNIT_BYTES_MAX)):
        return None
    unit_bytes = int(unit_text)
    try:
        words = np.frombuffer(base64.b64decode(encoded, validate=True), dtype=_WORD)
    except (binascii.Error, ValueError):
        return None
    is_unit = BLOCK_BYTES <= unit_bytes <= UNIT_BYTES_MAX and unit_bytes & (unit_bytes - 1) == 0
    if not is_unit or len(words) != -(-nbytes // unit_bytes):
        return None
    return Proof(nbytes, unit_bytes, tuple(int(word) for word in words))


def proved_bytes(proof: Proof, packed: bytes, arrived_bytes: int) -> int | None:
    """How many of the first `arrived_bytes`, whose blocks have these packed checksums, are proved: whole units, and at
    the object's end all of it. None where one of the units is not what it should be.
    """
    words = [int(word) for word in np.frombuffer(packed, dtype=_WORD)]
    blocks_each = proof.unit_bytes // BLOCK_BYTES
    is_whole = arrived_bytes == proof.nbytes
    unit_count = len(proof.words) if is_whole else arrived_bytes // proof.unit_bytes
    found = words[: unit_count * blocks_each]
    unit_bytes = BLOCK_BYTES
    while unit_bytes < proof.unit_bytes:
        found = _joined(found, unit_bytes, min(arrived_bytes, unit_count * proof.unit_bytes))
        unit_bytes *= 2
    if tuple(found) != proof.words[:unit_count]:
        return None
    return proof.nbytes if is_whole else unit_count * proof.unit_bytes


def proves(proof: Proof, packed: bytes, start: int, end: int) -> bool:
    """Whether the bytes [start, end) of the object, whose blocks have these packed checksums, are those of the proof.
    They begin with a unit, and end with one or with the object.
    """
    words = [int(word) for word in np.frombuffer(packed, dtype=_WORD)]
    unit_bytes = BLOCK_BYTES
    while unit_bytes < proof.unit_bytes:
        words = _joined(words, unit_bytes, end - start)
        unit_bytes *= 2
    return tuple(words) == proof.words[start // proof.unit_bytes : -(-end // proof.unit_bytes)]


def _joined(words: list[int], unit_bytes: int, nbytes: int) -> list[int]:
    """The checksums of pairs of units; the last unit of `nbytes` may be shorter, and be alone."""
    joined = []
    for index in range(0, len(words), 2):
        if index + 1 == len(words):
            joined.append(words[index])
        else:
            length = min(unit_bytes, nbytes - (index + 1) * unit_bytes)
            joined.append(combine_crc32c(words[index], words[index + 1], length))
    return joined
