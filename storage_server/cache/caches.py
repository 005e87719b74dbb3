"""The caches of one store: what each takes, what the books know of an object, and the room that is kept free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import nlargest
from typing import NamedTuple

from descriptors.chunk_flags import is_flagged
from descriptors.errors import CallerError
from descriptors.headers import CLASS_HEADER, CODEC_HEADER, LAYOUT_HEADER, PREFIX_HEADER
from descriptors.kv_forms import EncodedForm, KvLayout
from descriptors.objects import Attributes
from descriptors.pins import PIN_TAG, pinned_until
from descriptors.prefix_keys import model_of
from descriptors.status import MODELS_MAX, CacheStatus
from descriptors.units import GIB, MIB
from storage_server.cache.policies.ladder import ChunkForm
from storage_server.cache.rules.books import Books
from storage_server.cache.rules.entry import Entry
from storage_server.kernel.data.bound import Bound
from storage_server.kernel.rules.rows import CachedRow, KeyChange, attributes_of
from storage_server.planning.extent import ALIGNMENT_BYTES, aligned
from storage_server.planning.forms import kept_form

MODELS_COUNTED_MAX = 512
"""With more models in one cache, counts by model are not exact."""
AHEAD_FRACTION = 1 / 32
AHEAD_BYTES_MIN = 8 * MIB
AHEAD_BYTES_MAX = GIB


class ModelUse(NamedTuple):
    """How many objects of one model there are, and their bytes."""

    objects: int
    nbytes: int


NO_USE = ModelUse(0, 0)


@dataclass(slots=True)
class Cache:
    """One cache. `bucket` and `bound` are None for the whole directory, which only `disk_bytes` bounds."""

    books: Books
    bucket: str | None = None
    bound: Bound | None = None
    capacity_bytes: int | None = None
    sizes_bytes: dict[str, int] = field(default_factory=dict)
    models: dict[str, ModelUse] = field(default_factory=dict)
    """By the models' labels; objects that are no chunks of ours, and those of too many models, count under ""."""
    read_bytes: int = 0
    """The bytes of objects that were read."""
    used_bytes: int = 0
    room_bytes: int = 0
    """The same in whole pages, as the books count it."""
    part_bytes: int = 0
    """The bytes of parts of open uploads. They take room as objects do, and cannot be evicted."""
    parts_bound: Bound | None = None
    """Theirs in `bound`: they leave only when somebody ends the upload."""
    evicted_count: int = 0
    evicted_bytes: int = 0
    eviction_age_s: float | None = None
    """How long the object that left last had not been used."""
    is_derived: bool = False
    """Whether its capacity follows from what the file system offers."""
    is_replaced: bool = False
    """Whether its victims may be encoded: then there is as much room for those that wait as ahead of writes."""

    def note(self, change: KeyChange) -> None:
        """Count what a key of the bucket takes now."""
        nbytes = self.sizes_bytes.pop(change.key, None)
        if nbytes is not None:
            self.used_bytes -= nbytes
            self.room_bytes -= _room_of(nbytes)
            self._count_model(change.key, -1, -nbytes)
        if change.version is not None:
            self.count(change.key, change.nbytes)

    @property
    def taken_bytes(self) -> int:
        """The bytes of objects and parts together."""
        return self.used_bytes + self.part_bytes

    def is_gone(self, key: str) -> bool:
        """Whether the bucket has no such key any more. Of the whole directory nobody counts the keys: none is gone."""
        return self.bucket is not None and key not in self.sizes_bytes

    def count(self, key: str, nbytes: int) -> None:
        """Count a key that is not counted yet."""
        self.sizes_bytes[key] = nbytes
        self.used_bytes += nbytes
        self.room_bytes += _room_of(nbytes)
        self._count_model(key, 1, nbytes)

    def _count_model(self, key: str, objects: int, nbytes: int) -> None:
        label = model_of(key)
        if label not in self.models and (objects < 0 or len(self.models) >= MODELS_COUNTED_MAX):
            label = ""
        before = self.models.get(label, NO_USE)
        use = ModelUse(before.objects + objects, before.nbytes + nbytes)
        if use.objects > 0:
            self.models[label] = use
        else:
            self.models.pop(label, None)

    def note_read(self, keys: Sequence[str]) -> None:
        """Count the bytes of objects that were read."""
        self.read_bytes += sum([self.sizes_bytes.get(key, 0) for key in keys])

    def status(self, used_bytes: int, object_count: int) -> CacheStatus:
        """The cache as a status tells it, with its largest models."""
        models = nlargest(MODELS_MAX, self.models.copy().items(), key=lambda item: item[1].nbytes)
        return CacheStatus(
            bucket=self.bucket or "",
            capacity_bytes=self.capacity_bytes,
            used_bytes=used_bytes,
            object_count=object_count,
            evicted_count=self.evicted_count,
            evicted_bytes=self.evicted_bytes,
            eviction_age_s=self.eviction_age_s,
            read_bytes=self.read_bytes,
            models={label: (use.objects, use.nbytes) for label, use in models},
        )


def entry_of(change: KeyChange) -> Entry:
    """The books' entry of an object that was put just now."""
    assert change.version is not None
    pin, is_shared, form = _marks(change.attributes)
    return Entry(
        change.version,
        _room_of(change.nbytes),
        change.modified_at,
        change.modified_at,
        pinned_until=pin,
        is_dirty=change.is_dirty,
        is_shared=is_shared,
        form=_form_of_bytes(form, change.nbytes),
        replaced_version=change.replaced_version,
    )


def former_entry(row: CachedRow) -> Entry:
    """The books' entry of an object of before a restart. One that was never used counts as used when it was put."""
    text, modified_at, used_at = row.attributes, row.modified_at, row.used_at
    has_marks = PIN_TAG in text or PREFIX_HEADER in text or LAYOUT_HEADER in text or CODEC_HEADER in text
    pin, is_shared, form = _marks_of(text) if has_marks else NO_MARKS
    return Entry(
        version=row.version,
        nbytes=_room_of(row.nbytes),
        modified_at=modified_at,
        used_at=modified_at if used_at is None or used_at < modified_at else used_at,
        use_count=row.use_count or 1,
        parent=row.parent,
        pinned_until=pin,
        leased_until=row.leased_until,
        is_dirty=bool(row.is_dirty),
        is_shared=is_shared,
        form=_form_of_bytes(form, row.nbytes),
    )


def _room_of(nbytes: int) -> int:
    return max(ALIGNMENT_BYTES, aligned(nbytes))


_Marks = tuple[float | None, bool, ChunkForm | None]
"""The end of the pin, whether it is flagged as shared, and its form, if its layout is known."""
NO_MARKS: _Marks = (None, False, None)


@lru_cache(1024)
def _marks_of(text: str) -> _Marks:
    return _marks(attributes_of(text))


def _marks(attributes: Attributes) -> _Marks:
    form = form_of(attributes.headers)
    pin = _pinned_until(attributes.tags)
    return pin, is_flagged(attributes, PREFIX_HEADER), None if form is None else _the_one(form)


@lru_cache(1024)
def _the_one(form: ChunkForm) -> ChunkForm:
    """One for all chunks of a form: a cache has many of them."""
    return form


def form_of(headers: Mapping[str, str]) -> ChunkForm | None:
    """The form of a stored chunk: exact, with the layout that its PUT declared, or encoded; None for other objects."""
    content_class = headers.get(CLASS_HEADER, "")
    text = headers.get(CODEC_HEADER)
    if text is not None:
        encoded = kept_form(text)
        return None if encoded is None else ChunkForm(EncodedForm.parse(text).layout, encoded.chain, content_class)
    try:
        layout = KvLayout.parse(headers[LAYOUT_HEADER])
    except (KeyError, ValueError):
        return None
    return ChunkForm(layout, (), content_class)


def _form_of_bytes(form: ChunkForm | None, nbytes: int) -> ChunkForm | None:
    """None where a layout was declared of other bytes than the object has."""
    return form if form is None or form.chain or form.layout.nbytes == nbytes else None


def is_pinned(attributes: Attributes, now: float) -> bool:
    """Whether the tags of an object pin it now."""
    until = _pinned_until(attributes.tags)
    return until is not None and until > now


def _pinned_until(tags: Mapping[str, str]) -> float | None:
    """As descriptors.pins says; a date that an earlier release let pass pins without an end."""
    try:
        return pinned_until(tags)
    except CallerError:
        return math.inf


def spare_bytes_of(cache: Cache, capacity_bytes: int) -> int:
    """The room to keep ahead of writes, and for chunks that wait to be encoded."""
    return (1 + cache.is_replaced) * ahead_bytes_of(capacity_bytes)


def ahead_bytes_of(limit_bytes: int) -> int:
    """The room to keep ahead of writes."""
    return min(int(limit_bytes / 4), max(AHEAD_BYTES_MIN, min(AHEAD_BYTES_MAX, int(AHEAD_FRACTION * limit_bytes))))
