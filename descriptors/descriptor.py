"""The descriptor: one value that names a matched prefix, its shape, and the target of its layers.

Symbols as in `layout`. Invariants are checked on construction, so a Descriptor that exists is well-formed; codecs
(`descriptor_codec`) only translate. Source: ObjectCache paper, Table 1; docs/reference/protocol.md has the full text.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from descriptors.errors import CallerError, ErrorCode
from descriptors.layer_forms import CODEC_NAME
from descriptors.layout import ChunkLayout

PROTOCOL_VERSION = 1
EXTENDED_VERSION = 2
"""The version of descriptors that accept encoded layers, or that give places, and of those for one portion of a
delivery, which a gateway of a cluster sends to storage servers.
"""
BOUNDED_VERSION = 3
"""The version of descriptors with a bound of the loss."""
PORTIONS_MAX = 1_024
CHUNK_COUNT_MAX = 65_536
NUM_LAYERS_MAX = 1_024
CHUNK_TOKENS_MAX = 4_096
PER_LAYER_CHUNK_BYTES_MAX = 1 << 30
DELIVERY_BYTES_MAX = 1 << 46
OBJECT_KEY_BYTES_MAX = 1_024
LAYER_COMPUTE_US_MAX = 3_600_000_000
ADDRESS_MAX = (1 << 64) - 1
PLACE_MAX = (1 << 62) - 1
ACCEPTED_CODECS_MAX = 16
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""The types of KV elements, by the names that frameworks give them, with the bytes of one."""
WIDTH_MAX = 1 << 16
DESCRIPTOR_BYTES_MAX = 16 << 20

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{16,64}\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


class Delivery(Enum):
    """The order that the caller asks for; AUTO leaves the choice to the server's threshold."""

    LAYER_MAJOR = "layer-major"
    CHUNK_MAJOR = "chunk-major"
    AUTO = "auto"


class OnMissing(Enum):
    """The server's answer when a chunk is not stored: it refuses everything, or serves the chunks before it."""

    FAIL = "fail"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class RdmaTarget:
    """The place in a registered region that the delivery is written to; `offset` and `length` are bytes
    of the region.
    """

    agent_id: str
    region_id: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        require_name(self.agent_id, "rdma_target.agent_id")
        require_name(self.region_id, "rdma_target.region_id")
        _require_int(self.offset, 0, ADDRESS_MAX, "rdma_target.offset")
        _require_int(self.length, 1, ADDRESS_MAX, "rdma_target.length")


@dataclass(frozen=True, slots=True)
class Portion:
    """The place of a descriptor's chunks in a delivery of `chunk_count` chunks, which several storage servers bring
    together: chunk i of the descriptor is chunk `positions[i]` of the whole. Layers before `first_layer` have been
    brought by another server, which has been given up. `attempt` tells the tries of one portion apart.

    Raises CallerError(InvalidDescriptor).
    """

    index: int
    count: int
    chunk_count: int
    positions: tuple[int, ...]
    first_layer: int = 0
    attempt: int = 0

    def __post_init__(self) -> None:
        _require_int(self.count, 1, PORTIONS_MAX, "portion.count")
        _require_int(self.index, 0, self.count - 1, "portion.index")
        _require_int(self.chunk_count, 1, CHUNK_COUNT_MAX, "portion.chunk_count")
        _require_int(self.first_layer, 0, NUM_LAYERS_MAX - 1, "portion.first_layer")
        _require_int(self.attempt, 0, 255, "portion.attempt")
        places = np.asarray(self.positions, dtype=np.int64)
        if not len(places) or places[0] < 0 or places[-1] >= self.chunk_count or (np.diff(places) <= 0).any():
            raise invalid("portion.positions", f"must ascend from 0 on and stay below {self.chunk_count}")

    @property
    def label(self) -> str:
        """The name of this try of this portion, under the request's id."""
        return f"{self.index}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class Accept:
    """Encoded layers that the caller takes in place of exact ones: the names of their codecs, the type of the KV's
    elements, the most that the error of a chunk may be: the relative Frobenius norm of its worst layer, of keys or
    values; and the most that its loss may be: the KL a token in nats that its form was measured to cost its model. None
    is no bound. A server does not use a codec that it does not know.

    Raises CallerError(InvalidDescriptor).
    """

    codecs: tuple[str, ...]
    element: str
    max_error: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.codecs) <= ACCEPTED_CODECS_MAX:
            raise invalid("accept", f"needs 1 to {ACCEPTED_CODECS_MAX} codecs, not {len(self.codecs)}")
        for index, codec in enumerate(self.codecs):
            if not isinstance(codec, str) or not CODEC_NAME.match(codec):
                raise invalid(f"accept[{index}]", "must be 1 to 32 characters of a-z 0-9 . _ -")
        if len(set(self.codecs)) != len(self.codecs):
            raise invalid("accept", "names a codec twice")
        if self.element not in ELEMENT_BYTES:
            raise invalid("element", f"must be one of {', '.join(ELEMENT_BYTES)}, not {self.element!r}")
        if self.max_error is not None and not 0 <= self.max_error < math.inf:
            raise invalid("max_error", f"must be a number from 0, not {self.max_error!r}")
        if self.max_loss is not None and not 0 <= self.max_loss < math.inf:
            raise invalid("max_loss", f"must be a number from 0, not {self.max_loss!r}")

    @property
    def version(self) -> int:
        """The version of descriptors with this value."""
        return EXTENDED_VERSION if self.max_loss is None else BOUNDED_VERSION


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A request for the KV of `chunk_keys`, in prefix order. With `portion`, they are some of the chunks of a delivery.
    With `places`, chunk i lands whole at byte `places[i]` of the target; between the chunks nothing is written.

    Raises CallerError(InvalidDescriptor), which names the field, where docs/reference/protocol.md refuses the value.
    """

    chunk_keys: tuple[str, ...]
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    delivery: Delivery = Delivery.AUTO
    on_missing: OnMissing = OnMissing.FAIL
    rdma_target: RdmaTarget | None = None
    request_id: str | None = None
    layer_compute_us: tuple[int, ...] = ()
    version: int = PROTOCOL_VERSION
    portion: Portion | None = None
    accept: Accept | None = None
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wanted = version_of(self.accept, is_plain=self.portion is None and not self.places)
        if self.version != wanted:
            raise invalid("version", f"must be {wanted}, not {self.version!r}")
        _require_keys(self.chunk_keys)
        _require_int(self.num_layers, 1, NUM_LAYERS_MAX, "num_layers")
        _require_int(self.chunk_tokens, 1, CHUNK_TOKENS_MAX, "chunk_tokens")
        _require_int(self.per_layer_chunk_bytes, 1, PER_LAYER_CHUNK_BYTES_MAX, "per_layer_chunk_bytes")
        if self.delivery_bytes > DELIVERY_BYTES_MAX:
            raise invalid("chunk_keys", f"N*L*S is {self.delivery_bytes} bytes, at most {DELIVERY_BYTES_MAX}")
        if self.request_id is not None:
            require_request_id(self.request_id)
        if self.portion is not None:
            self._check_portion(self.portion)
        if self.accept is not None:
            self._check_accept(self.accept)
        if self.places:
            self._check_places()
        if self.rdma_target is not None:
            self._check_target(self.rdma_target)
        self._check_compute()

    def _check_portion(self, portion: Portion) -> None:
        if len(portion.positions) != self.chunk_count:
            raise invalid("portion.positions", f"has {len(portion.positions)} entries for {self.chunk_count} chunks")
        if portion.first_layer >= self.num_layers:
            raise invalid("portion.first_layer", f"is {portion.first_layer} of {self.num_layers} layers")

    def _check_accept(self, accept: Accept) -> None:
        if self.portion is not None and (self.rdma_target is not None or self.portion.first_layer):
            raise invalid("accept", "does not go with a portion that goes into memory, or begins with a later layer")
        token_bytes = 2 * self.chunk_tokens * ELEMENT_BYTES[accept.element]
        if self.per_layer_chunk_bytes % token_bytes or self.per_layer_chunk_bytes > WIDTH_MAX * token_bytes:
            raise invalid(
                "per_layer_chunk_bytes",
                f"is {self.per_layer_chunk_bytes}, no keys and values of {self.chunk_tokens} {accept.element} tokens",
            )

    def _check_places(self) -> None:
        if self.rdma_target is None or self.delivery is not Delivery.CHUNK_MAJOR or self.accept is not None:
            raise invalid("places", "go with an rdma_target and chunk-major delivery, and not with accept")
        if len(self.places) != self.chunk_count:
            raise invalid("places", f"has {len(self.places)} entries for {self.chunk_count} chunks")
        if not set(map(type, self.places)) <= {int} or not 0 <= min(self.places) <= max(self.places) <= PLACE_MAX:
            for index, place in enumerate(self.places):
                _require_int(place, 0, PLACE_MAX, f"places[{index}]")
        places = np.array(self.places, dtype=np.int64)
        order = np.argsort(places, kind="stable")
        overlaps = np.flatnonzero(np.diff(places[order]) < self.layout.chunk_bytes)
        if len(overlaps):
            first, second = order[overlaps[0]], order[overlaps[0] + 1]
            raise invalid(f"places[{second}]", f"is within {self.layout.chunk_bytes} bytes (L*S) of places[{first}]")

    def _check_target(self, target: RdmaTarget) -> None:
        if self.request_id is None:
            raise invalid("request_id", "is required with rdma_target")
        if target.length < self.target_bytes:
            what = "N*L*S" if not self.places else "the last place and L*S"
            problem = f"is {target.length} bytes, the delivery may need {self.target_bytes} ({what})"
            raise invalid("rdma_target.length", problem)
        if target.offset + target.length > ADDRESS_MAX:
            raise invalid("rdma_target.offset", "offset + length passes the end of the address space")

    def _check_compute(self) -> None:
        if len(self.layer_compute_us) not in (0, 1, self.num_layers):
            raise invalid(
                "layer_compute_us", f"one number or {self.num_layers} of them, not {len(self.layer_compute_us)}"
            )
        for value in self.layer_compute_us:
            _require_int(value, 0, LAYER_COMPUTE_US_MAX, "layer_compute_us")

    @property
    def chunk_count(self) -> int:
        """N, the number of chunks asked for."""
        return len(self.chunk_keys)

    @property
    def whole_chunk_count(self) -> int:
        """N of the delivery that this is a portion of, or of this one."""
        return self.chunk_count if self.portion is None else self.portion.chunk_count

    @property
    def target_bytes(self) -> int:
        """The bytes of the target from its beginning to the end of the delivery if every chunk is served."""
        if self.places:
            return max(self.places) + self.layout.chunk_bytes
        return self.layout.delivery_bytes(self.whole_chunk_count)

    @property
    def exact(self) -> Descriptor:
        """The same request, for exact bytes only."""
        return self.accepting(None)

    def accepting(self, accept: Accept | None) -> Descriptor:
        """The same request, for what `accept` says."""
        version = version_of(accept, is_plain=self.portion is None and not self.places)
        return self if accept == self.accept else replace(self, accept=accept, version=version)

    def cut_to(self, chunk_count: int) -> Descriptor:
        """The request for the first `chunk_count` chunks, all of which must be there."""
        keys, places = self.chunk_keys[:chunk_count], self.places[:chunk_count]
        return replace(self, chunk_keys=keys, places=places, on_missing=OnMissing.FAIL)

    @property
    def unplaced(self) -> Descriptor:
        """The same request, without the memory that it is for."""
        version = version_of(self.accept, is_plain=self.portion is None)
        return replace(self, rdma_target=None, places=(), version=version)

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S as one value."""
        return ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)

    @property
    def delivery_bytes(self) -> int:
        """W = N*L*S, the bytes of the delivery if every chunk is served."""
        return self.chunk_count * self.num_layers * self.per_layer_chunk_bytes


def version_of(accept: Accept | None, *, is_plain: bool) -> int:
    """The version of a descriptor that accepts that, and that is otherwise plain, or not."""
    if accept is not None:
        return accept.version
    return PROTOCOL_VERSION if is_plain else EXTENDED_VERSION


def invalid(field: str, problem: str) -> CallerError:
    """The error for a descriptor field that breaks a rule."""
    return CallerError(ErrorCode.INVALID_DESCRIPTOR, f"{field} {problem}", field=field)


def is_request_id(value: str) -> bool:
    """Whether a text has the form of a request id."""
    return _REQUEST_ID.match(value) is not None


def require_request_id(value: str) -> str:
    """A request id is 16 to 64 of A-Z a-z 0-9 . _ -"""
    if not isinstance(value, str) or not is_request_id(value):
        raise invalid("request_id", "must be 16 to 64 characters of A-Z a-z 0-9 . _ -")
    return value


def require_name(value: str, field: str) -> str:
    """An agent or region id is 1 to 64 of A-Z a-z 0-9 . _ -"""
    if not isinstance(value, str) or not _NAME.match(value):
        raise invalid(field, "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
    return value


def _require_int(value: int, least: int, most: int, field: str) -> None:
    if type(value) is not int or not least <= value <= most:
        raise invalid(field, f"must be an integer from {least} to {most}, not {value!r}")


def _require_keys(keys: tuple[str, ...]) -> None:
    if not 1 <= len(keys) <= CHUNK_COUNT_MAX:
        raise invalid("chunk_keys", f"needs 1 to {CHUNK_COUNT_MAX} keys, not {len(keys)}")
    for index, key in enumerate(() if _are_plain(keys) else keys):
        if not isinstance(key, str) or not 1 <= key_bytes(key) <= OBJECT_KEY_BYTES_MAX:
            raise invalid(f"chunk_keys[{index}]", f"must be 1 to {OBJECT_KEY_BYTES_MAX} bytes of UTF-8 without NUL")
    if len(set(keys)) != len(keys):
        seen: set[str] = set()
        for index, key in enumerate(keys):
            if key in seen:
                raise invalid(f"chunk_keys[{index}]", "appears twice")
            seen.add(key)


def _are_plain(keys: tuple[str, ...]) -> bool:
    """Whether all keys are surely valid: ASCII without NUL, none too long. It looks at all of them at once."""
    try:
        if not all(map(str.isascii, keys)):
            return False  # joined, wide keys would take four bytes for each character
    except TypeError:
        return False
    lengths = list(map(len, keys))
    return min(lengths) > 0 and max(lengths) <= OBJECT_KEY_BYTES_MAX and "\0" not in "".join(keys)


def key_bytes(key: str) -> int:
    """The length of a key in UTF-8, or 0 for an invalid key: lone surrogates have no UTF-8 form, and NUL is refused. A
    key of more characters than a key may have bytes is not encoded: its characters are counted.
    """
    if len(key) > OBJECT_KEY_BYTES_MAX:
        return len(key)
    if "\0" in key:
        return 0
    if key.isascii():
        return len(key)
    try:
        return len(key.encode())
    except UnicodeEncodeError:
        return 0
