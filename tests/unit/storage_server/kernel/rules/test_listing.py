"""Listing decisions: pages, groups and markers, against the definition."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors.objects import ListRequest, ObjectInfo, UploadInfo, UploadListRequest
from storage_server.kernel.rules.listing import list_page, list_uploads, successor

KEY = st.text(st.sampled_from("ab/.\u00e9\ud7ff\ue000\U0010ffff"), min_size=1, max_size=5)


@given(keys=st.sets(KEY, max_size=25), prefix=st.sampled_from(["", "a", "a/", "/"]), size=st.integers(1, 4),
       delimiter=st.sampled_from(["", "/", "/a"]))  # fmt: skip
@settings(max_examples=150)
def test_pages_together_are_the_listing(keys: set[str], prefix: str, size: int, delimiter: str) -> None:
    """Against the definition: sort by UTF-8 bytes, roll up, cut into pages."""
    ordered = sorted(keys, key=str.encode)

    async def fetch(start: str, inclusive: bool, limit: int) -> list[ObjectInfo]:
        after = [k for k in ordered if k.encode() > start.encode() or (inclusive and k == start)]
        rows = []
        for key in after[:limit]:
            if not key.startswith(prefix):
                break
            rows.append(ObjectInfo(key, 0, "", 0.0))
        return rows

    expected_objects, expected_groups = [], []
    for key in ordered:
        if not key.startswith(prefix):
            continue
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        if at < 0:
            expected_objects.append(key)
        elif (group := key[: at + len(delimiter)]) not in expected_groups:
            expected_groups.append(group)

    async def collect() -> tuple[list[str], list[str]]:
        objects, groups, after = [], [], ""
        for _ in range(100):
            page = await list_page(ListRequest("b", prefix, delimiter, after, size), fetch)
            assert len(page.objects) + len(page.common_prefixes) <= size
            objects += [info.key for info in page.objects]
            groups += page.common_prefixes
            if page.next_after is None:
                return objects, groups
            after = page.next_after
        raise AssertionError("the listing does not end")

    assert asyncio.run(collect()) == (expected_objects, expected_groups)


@given(KEY, KEY)
def test_successor_is_above_everything_with_the_prefix(prefix: str, tail: str) -> None:
    above = successor(prefix)
    if above is None:
        assert set(prefix) == {"\U0010ffff"}
    else:
        assert (prefix + tail).encode() < above.encode()
        assert above.encode() > prefix.encode()


@given(uploads=st.lists(st.tuples(KEY, st.integers(0, 3)), max_size=15), prefix=st.sampled_from(["", "a", "a/"]),
       size=st.integers(1, 4), delimiter=st.sampled_from(["", "/"]))  # fmt: skip
@settings(max_examples=150)
def test_pages_of_uploads_together_are_all_uploads(
    uploads: list[tuple[str, int]], prefix: str, size: int, delimiter: str
) -> None:
    """By key in UTF-8 order, then by age; several uploads of one key are told apart by their ids."""
    entries = [UploadInfo(f"id{index}", key, float(age), "o") for index, (key, age) in enumerate(uploads)]
    ordered = sorted(entries, key=lambda info: (info.key.encode(), info.initiated_at, info.upload_id))

    async def fetch(key: str, upload_id: str | None, limit: int) -> list[UploadInfo]:
        rows = [info for info in ordered if info.key.encode() >= key.encode()]
        for index, info in enumerate(rows):
            if upload_id is not None and (info.key, info.upload_id) == (key, upload_id):
                rows = rows[index + 1 :]
                break
        return [info for info in rows[:limit] if info.key.startswith(prefix)]

    expected, groups = [], []
    for info in ordered:
        if not info.key.startswith(prefix):
            continue
        at = info.key.find(delimiter, len(prefix)) if delimiter else -1
        if at < 0:
            expected.append(info.upload_id)
        elif (group := info.key[: at + 1]) not in groups:
            groups.append(group)

    async def collect() -> tuple[list[str], list[str]]:
        found, rolled, marker = [], [], ("", "")
        for _ in range(100):
            page = await list_uploads(UploadListRequest("b", prefix, delimiter, *marker, size), fetch)
            assert len(page.uploads) + len(page.common_prefixes) <= size
            found += [info.upload_id for info in page.uploads]
            rolled += page.common_prefixes
            if page.next_key_marker is None:
                return found, rolled
            marker = page.next_key_marker, page.next_upload_id_marker or ""
        raise AssertionError("the listing does not end")

    assert asyncio.run(collect()) == (expected, groups)


@pytest.mark.slow
@pytest.mark.parametrize("delimiter", ["", "/"])
def test_a_long_listing_reads_each_row_about_once(delimiter: str) -> None:
    """100,000 keys in pages of 1,000, or rolled up into 1,000 groups: the last page costs what the first did."""
    ordered = [f"group-{index // 100:04}/key-{index % 100:02}" for index in range(100_000)]
    rows_read = 0

    async def fetch(start: str, inclusive: bool, limit: int) -> list[ObjectInfo]:
        nonlocal rows_read
        at = bisect_left(ordered, start) if inclusive else bisect_right(ordered, start)
        rows = [ObjectInfo(key, 0, "", 0.0) for key in ordered[at : at + limit]]
        rows_read += len(rows)
        return rows

    async def collect() -> int:
        after, found = "", 0
        while True:
            page = await list_page(ListRequest("b", "", delimiter, after, 1000), fetch)
            found += len(page.objects) + len(page.common_prefixes)
            if page.next_after is None:
                return found
            after = page.next_after

    assert asyncio.run(collect()) == (1000 if delimiter else 100_000)
    assert rows_read <= (1000 * 17 if delimiter else 101_000)


def test_each_group_of_uploads_takes_a_few_rows() -> None:
    """2,100 uploads, each in a folder of its own: one list read a million rows, for more than a minute."""
    ordered = [f"group-{index:04}/key" for index in range(2_100)]
    rows_read = 0

    async def fetch(key: str, upload_id: str | None, limit: int) -> list[UploadInfo]:
        nonlocal rows_read
        at = bisect_left(ordered, key)
        rows = [UploadInfo("id", found, 0.0, "o") for found in ordered[at : at + limit]]
        rows_read += len(rows)
        return rows

    page = asyncio.run(list_uploads(UploadListRequest("b", "", "/", max_uploads=1000), fetch))
    assert page.common_prefixes == [f"group-{index:04}/" for index in range(1000)]
    assert rows_read <= 1001 * 16
