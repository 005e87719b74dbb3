"""A page of upstream's list, with the chunks that are here and not there yet. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from descriptors.objects import ListPage, ListRequest, ObjectInfo
from storage_server.kernel.rules.listing import rolled_up

AFTER_PREFIX = "\U0010ffff"
"""The greatest character: a key after a common prefix and this is after all that the prefix rolls up."""


def merged(page: ListPage, dirty: Sequence[ObjectInfo], request: ListRequest) -> ListPage:
    """`dirty` are the first such chunks behind the page's start, more than `max_keys` where there may be others behind
    them. They were read before `page`: a chunk that got upstream meanwhile is in both. A dirty chunk replaces
    upstream's object of the same key.
    """
    entries: dict[str, ObjectInfo | None] = dict.fromkeys(page.common_prefixes)
    entries |= {info.key: info for info in page.objects}
    for info in dirty:
        group = rolled_up(info.key, request)
        entries[group or info.key] = None if group else info
    ends = [page.next_after] if page.next_after is not None else []
    if len(dirty) > request.max_keys:
        last = dirty[-1].key
        ends.append(_end_of(rolled_up(last, request) or last, is_group=rolled_up(last, request) is not None))
    next_after = min(ends, default=None)
    names = sorted(name for name in entries if next_after is None or name <= next_after)
    if len(names) > request.max_keys:
        names = names[: request.max_keys]
        next_after = _end_of(names[-1], is_group=entries[names[-1]] is None)
    shown = [entries[name] for name in names]
    return ListPage(
        [info for info in shown if info is not None], [name for name in names if entries[name] is None], next_after
    )


def _end_of(name: str, *, is_group: bool) -> str:
    """The name behind which the next page begins; behind a common prefix, all of its keys are passed."""
    return name + AFTER_PREFIX if is_group else name


def dirty_after(request: ListRequest) -> str:
    """The name behind which dirty chunks belong to the page."""
    return _end_of(request.after, is_group=rolled_up(request.after, request) == request.after)
