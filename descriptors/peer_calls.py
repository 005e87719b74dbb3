"""How StorageApi calls look between a gateway and a storage server: POST /v1/{operation}.

Arguments are JSON, base64url, in `x-objectcache-call`; a body carries what may be large (object bytes, descriptor,
key lists, agent metadata). Answers are JSON; where the answer's body is object bytes, the JSON is in a header.
"""

from __future__ import annotations

from dataclasses import dataclass

from descriptors.storage_api import ByteRange, ObjectInfo

RESULT_HEADER = "x-objectcache-result"
CALL_BYTES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class ReadHead:
    """What `open_object` answers before the bytes."""

    info: ObjectInfo
    range: ByteRange
