"""The entry that lies beside a chunk's bytes in remote DRAM: the chunk's name, home's description of it, and the proof
of its bytes. Pure.

    bytes of the JSON (u32) | CRC-32C of the JSON (u32) | JSON | zeros up to ENTRY_BYTES

All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

from awscrt.checksums import crc32c

from descriptors.objects import ObjectInfo
from storage_server.home.rules.proof import Proof, parse_proof
from storage_server.kernel.rules.plain_rows import is_plain, is_size, is_time
from storage_server.kernel.rules.rows import object_attributes, stored_object

ENTRY_BYTES = 8192
_HEAD = struct.Struct("<II")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A chunk as home had it at `seen_at` (Unix seconds)."""

    bucket: str
    info: ObjectInfo
    proof: Proof
    seen_at: float


def encode_entry(entry: RemoteEntry) -> bytes | None:
    """ENTRY_BYTES; None where the entry does not fit."""
    info = entry.info
    fields = [_FORMAT, entry.bucket, info.key, info.nbytes, info.etag, info.modified_at]
    text = json.dumps([*fields, object_attributes(info, None), entry.proof.header(), entry.seen_at]).encode()
    if _HEAD.size + len(text) > ENTRY_BYTES:
        return None
    return (_HEAD.pack(len(text), crc32c(text)) + text).ljust(ENTRY_BYTES, b"\0")


def decode_entry(data: bytes, bucket: str, key: str) -> RemoteEntry | None:
    """The entry; None where it is no entry of ours, or another chunk's, or says what no answer could tell: whoever may
    write to remote DRAM chooses it.
    """
    nbytes, checksum = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + nbytes]
    if len(text) != nbytes or crc32c(text) != checksum:
        return None
    try:
        found, found_bucket, found_key, size, etag, modified_at, attributes, proof_text, seen_at = json.loads(text)
        if (found, found_bucket, found_key) != (_FORMAT, bucket, key):
            return None
        stored = stored_object((key, 0, size, etag, float(modified_at), attributes))
        if not (is_size(size) and is_plain(stored) and is_time(float(seen_at))):
            return None
        proof = parse_proof(proof_text, size)
        return None if proof is None else RemoteEntry(bucket, stored.info, proof, float(seen_at))
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None
