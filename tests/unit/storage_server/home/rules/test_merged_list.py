"""Pages of what is here and what is there: whatever lies where, all pages together are the whole list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.objects import ListPage, ListRequest, ObjectInfo
from storage_server.home.rules.merged_list import AFTER_PREFIX, dirty_after, merged
from storage_server.kernel.rules.listing import list_page

KEYS = st.lists(st.text("ab/", min_size=1, max_size=4), max_size=12, unique=True)


def infos(keys: Sequence[str], etag: str) -> list[ObjectInfo]:
    return [ObjectInfo(key, 1, etag, 0.0) for key in sorted(keys)]


def page_of(rows: Sequence[ObjectInfo], request: ListRequest) -> ListPage:
    """A page of a store that has these objects. Like a page from upstream, it ends behind a whole common prefix."""

    async def fetch(start: str, inclusive: bool, limit: int) -> list[ObjectInfo]:
        behind = [row for row in rows if row.key > start or (inclusive and row.key == start)]
        return [row for row in behind if row.key.startswith(request.prefix)][:limit]

    page = asyncio.run(list_page(request, fetch))
    if page.next_after is not None and page.next_after in page.common_prefixes:
        return ListPage(page.objects, page.common_prefixes, page.next_after + AFTER_PREFIX)
    return page


def whole(there: Sequence[ObjectInfo], here: Sequence[ObjectInfo], request: ListRequest) -> list[tuple[str, str]]:
    """All pages, one after the other: names with their ETags, common prefixes with none."""
    found: list[tuple[str, str]] = []
    for _ in range(50):
        start = dirty_after(request)
        dirty = [row for row in here if row.key > start and row.key.startswith(request.prefix)]
        page = merged(page_of(there, request), dirty[: request.max_keys + 1], request)
        assert len(page.objects) + len(page.common_prefixes) <= request.max_keys
        found += [(info.key, info.etag) for info in page.objects] + [(name, "") for name in page.common_prefixes]
        if page.next_after is None:
            return found
        request = ListRequest("b", request.prefix, request.delimiter, page.next_after, request.max_keys)
    raise AssertionError("the pages do not end")


@given(there=KEYS, here=KEYS, size=st.integers(1, 6), prefix=st.sampled_from(["", "a", "a/"]), delimited=st.booleans())
def test_all_pages_together_show_each_name_once(
    there: list[str], here: list[str], size: int, prefix: str, delimited: bool
) -> None:
    request = ListRequest("b", prefix, "/" if delimited else "", "", size)
    both = {info.key: info for info in (*infos(there, "there"), *infos(here, "here"))}
    unpaged = page_of([both[key] for key in sorted(both)], ListRequest("b", prefix, request.delimiter, "", 1000))
    wanted = [(info.key, info.etag) for info in unpaged.objects] + [(name, "") for name in unpaged.common_prefixes]
    assert sorted(whole(infos(there, "there"), infos(here, "here"), request)) == sorted(wanted)


@pytest.mark.parametrize(("after", "start"), [("", ""), ("a", "a"), ("a/b", "a/b"), ("a/", "a/" + AFTER_PREFIX)])
def test_behind_a_common_prefix_all_of_its_keys_are_passed(after: str, start: str) -> None:
    assert dirty_after(ListRequest("b", "", "/", after, 10)) == start
