"""How StorageApi calls look between a gateway and a storage server: POST /v1/{operation}.

Arguments are JSON, base64url, in `x-objectcache-call`; a body carries what may be large (object bytes, descriptor,
agent metadata, long arguments). Answers are JSON; where the answer's body is object bytes, the JSON
is in a header. Object bytes that go to the storage server are followed by the JSON of their `BodyDigests`.

Calls that take and give plain values need no code of their own: their types are read off the StorageApi.
"""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from descriptors.storage_api import StorageApi

RESULT_HEADER = "x-objectcache-result"
CALL_BYTES_MAX = 65_536
ARGUMENT_BYTES_MAX = 16_384
DIGESTS_BYTES_MAX = 4_096
PLAIN_CALLS = (
    "create_bucket",
    "head_bucket",
    "list_buckets",
    "delete_bucket",
    "get_lifecycle",
    "set_lifecycle",
    "head_object",
    "object_parts",
    "copy_object",
    "delete_object",
    "delete_objects",
    "set_tags",
    "list_objects",
    "create_upload",
    "copy_part",
    "complete_upload",
    "abort_upload",
    "list_parts",
    "list_uploads",
    "transports",
    "scheduler",
    "delete_agent",
    "get_object_into",
    "put_object_from",
    "cancel",
)


class CallTypes:
    """The argument and result types of one StorageApi method, as JSON codecs."""

    def __init__(self, name: str) -> None:
        hints = get_type_hints(getattr(StorageApi, name))
        self.result: TypeAdapter[Any] = TypeAdapter(hints.pop("return"))
        self.arguments: dict[str, TypeAdapter[Any]] = {key: TypeAdapter(hint) for key, hint in hints.items()}
        self.names = [key for key in inspect.signature(getattr(StorageApi, name)).parameters if key != "self"]

    def encode(self, *values: object) -> dict[str, Any]:
        """Arguments, in order, as JSON values."""
        return {
            name: self.arguments[name].dump_python(value, mode="json")
            for name, value in zip(self.names, values, strict=True)
        }


class PlainCall:
    """One plain call of one StorageApi, from JSON to JSON."""

    def __init__(self, storage: StorageApi, name: str) -> None:
        self._types = CallTypes(name)
        self._method = getattr(storage, name)

    async def make(self, arguments: dict[str, Any]) -> Any:
        """Make the call. Raises ObjectCacheError, and ValidationError for arguments of other types."""
        values = {name: codec.validate_python(arguments[name]) for name, codec in self._types.arguments.items()}
        return await self._method(**values)

    def encode(self, result: Any) -> bytes:
        """The JSON of what the call gave."""
        return self._types.result.dump_json(result)
