"""The decisions of ListObjects: keys are rolled up at a delimiter, and pages begin where the last one ended. Rows are
fetched in pages by a function.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from descriptors.objects import ListPage, ListRequest, ObjectInfo, UploadInfo, UploadListRequest, UploadPage

ROWS_PER_FETCH = 1001
ROWS_AFTER_GROUP = 16


class _RowCounts:
    """How many rows are fetched next for a page of `most` entries: few where a common prefix may let the following ones
    be skipped, then more. Else each of a thousand common prefixes would take a thousand rows.
    """

    def __init__(self, delimiter: str, most: int) -> None:
        self._most = min(most + 1, ROWS_PER_FETCH)
        self._count = ROWS_AFTER_GROUP if delimiter else ROWS_PER_FETCH

    def next(self) -> int:
        count, self._count = self._count, min(4 * self._count, ROWS_PER_FETCH)
        return min(count, self._most)

    def note_group(self) -> None:
        """The rows behind a common prefix come next."""
        self._count = ROWS_AFTER_GROUP


Fetch = Callable[[str, bool, int], Awaitable[list[ObjectInfo]]]
"""Maps (start, inclusive, limit) to rows with the wanted prefix, in key order."""


def successor(prefix: str) -> str | None:
    """The least string above every string that starts with `prefix`, in UTF-8 order; None when there is none."""
    while prefix:
        code = ord(prefix[-1]) + 1
        if code == 0xD800:
            code = 0xE000
        if code <= 0x10FFFF:
            return prefix[:-1] + chr(code)
        prefix = prefix[:-1]
    return None


def rolled_up(key: str, request: ListRequest) -> str | None:
    """The common prefix that `key` is rolled up into, or None when the key is listed itself."""
    if not request.delimiter:
        return None
    at = key.find(request.delimiter, len(request.prefix))
    return None if at < 0 else key[: at + len(request.delimiter)]


async def list_page(request: ListRequest, fetch: Fetch) -> ListPage:
    """One page: objects and common prefixes together number at most `max_keys`; `next_after` is None at the end."""
    objects: list[ObjectInfo] = []
    prefixes: list[str] = []
    last = ""
    if request.max_keys == 0:
        return ListPage([], [], None)
    async for key, entry in _entries(request, fetch):
        if len(objects) + len(prefixes) == request.max_keys:
            return ListPage(objects, prefixes, last)
        if entry is None:
            prefixes.append(key)
        else:
            objects.append(entry)
        last = key
    return ListPage(objects, prefixes, None)


async def _entries(request: ListRequest, fetch: Fetch) -> AsyncIterator[tuple[str, ObjectInfo | None]]:
    """Objects and common prefixes in key order. The keys of a common prefix are skipped, not read."""
    start, inclusive = _first(request)
    row_counts = _RowCounts(request.delimiter, request.max_keys)
    while start is not None:
        rows = await fetch(start, inclusive, row_counts.next())
        if not rows:
            return
        start, inclusive = rows[-1].key, False
        for row in rows:
            group = rolled_up(row.key, request)
            if group is None:
                yield row.key, row
                continue
            yield group, None
            start, inclusive = successor(group), True
            row_counts.note_group()
            break


def _first(request: ListRequest) -> tuple[str | None, bool]:
    if request.after < request.prefix or not request.after:
        return request.prefix, True
    if rolled_up(request.after, request) == request.after:
        return successor(request.after), True
    return request.after, False


FetchUploads = Callable[[str, str | None, int], Awaitable[list[UploadInfo]]]
"""Maps (key, upload_id, limit) to uploads from `key` on, by key and then age; with an id, only those
after that upload.
"""


async def list_uploads(request: UploadListRequest, fetch: FetchUploads) -> UploadPage:
    """One page: uploads and common prefixes together number at most `max_uploads`; `next_*` are None at the end."""
    uploads: list[UploadInfo] = []
    prefixes: list[str] = []
    if request.max_uploads == 0:
        return UploadPage([], [], None, None)
    last: tuple[str, str] = ("", "")
    async for name, entry in _upload_entries(request, fetch):
        if len(uploads) + len(prefixes) == request.max_uploads:
            return UploadPage(uploads, prefixes, *last)
        if entry is None:
            prefixes.append(name)
        else:
            uploads.append(entry)
        last = name, entry.upload_id if entry is not None else ""
    return UploadPage(uploads, prefixes, None, None)


async def _upload_entries(
    request: UploadListRequest, fetch: FetchUploads
) -> AsyncIterator[tuple[str, UploadInfo | None]]:
    """Uploads and common prefixes in order. Without an upload id, the uploads of the key marker itself are skipped."""
    start: str | None = max(request.key_marker, request.prefix)
    seen: str | None = None
    if request.key_marker and request.key_marker >= request.prefix:
        if _group(request.key_marker, request) == request.key_marker:
            start = successor(request.key_marker)
        elif request.upload_id_marker:
            seen = request.upload_id_marker
        else:
            start = request.key_marker + "\0"
    row_counts = _RowCounts(request.delimiter, request.max_uploads)
    while start is not None:
        rows = await fetch(start, seen, row_counts.next())
        if not rows:
            return
        start, seen = rows[-1].key, rows[-1].upload_id
        for row in rows:
            group = _group(row.key, request)
            if group is None:
                yield row.key, row
                continue
            yield group, None
            start, seen = successor(group), None
            row_counts.note_group()
            break


def _group(key: str, request: UploadListRequest) -> str | None:
    return rolled_up(key, ListRequest(request.bucket, request.prefix, request.delimiter))
