"""After a restart: everything acknowledged is there, byte for byte, and nothing is half there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from tests.faults.crash.client import Client, error_code, tree
from tests.faults.crash.journal import Journal
from tests.faults.crash.model import SentPart, Shown, Upload
from tests.faults.crash.reading import explained, listed, listed_as, matching, tags_of
from tests.faults.crash.world import BUCKET, World

CHECKERS = 3
_Parts = dict[int, tuple[str, int]]


def check(world: World, url: str) -> None:
    """Compare all, and note from here on what of the unanswered was done. Raises CrashFailure."""
    journal = world.journal
    journal.note("check", "restarted")
    keys = sorted(journal.histories)
    shares = [keys[index::CHECKERS] for index in range(CHECKERS)]
    with ThreadPoolExecutor(CHECKERS) as pool:
        shown = {
            key: version for share in pool.map(lambda s: _check_keys(journal, url, s), shares) for key, version in share
        }
    client = Client(url, BUCKET)
    try:
        found = listed(client)
        expected = {key: listed_as(version) for key, version in shown.items() if version is not None}
        if found != expected:
            wrong = {key: (found.get(key), expected.get(key)) for key in found.keys() | expected.keys()}
            wrong = {key: pair for key, pair in wrong.items() if pair[0] != pair[1]}
            journal.fail("check", f"the list and the objects differ (listed, read): {wrong}")
        _check_uploads(world, client, shown)
        for upload in world.ended:
            _check_ended(journal, client, upload)
    finally:
        client.close()
    journal.require()
    journal.in_doubt_count = 0
    for key, version in shown.items():
        journal.settle(key, version)


def _check_keys(journal: Journal, url: str, keys: Sequence[str]) -> list[tuple[str, Shown]]:
    client = Client(url, BUCKET)
    try:
        return [(key, _check_key(journal, client, key)) for key in keys]
    finally:
        client.close()


def _check_key(journal: Journal, client: Client, key: str) -> Shown:
    now = journal.tick()
    allowed = journal.allowed(key, now, now)
    reply = client.call("GET", key)
    candidates = matching(reply, allowed)
    if candidates and candidates != [None]:
        tags = tags_of(client.call("GET", key, "tagging="))
        candidates = [version for version in candidates if version is not None and version.tags == tags]
    if not candidates:
        journal.fail("check", explained(key, reply, allowed))
        return None
    head = client.call("HEAD", key)
    if not matching(head, candidates, has_body=False):
        journal.fail("check", f"HEAD and GET of {key} differ: {head}")
    return candidates[0]


def _check_uploads(world: World, client: Client, shown: dict[str, Shown]) -> None:
    journal = world.journal
    found: dict[str, str] = {}
    root = tree(client.call("GET", query="uploads=&max-uploads=1000"))
    for item in root.iterfind("Upload"):
        found[item.findtext("UploadId") or ""] = item.findtext("Key") or ""
    for writer, uploads in world.uploads.items():
        for upload in list(uploads):
            is_there = found.pop(upload.upload_id, None) == upload.key
            if is_there:
                _check_parts(journal, client, upload)
            if upload.ending is not None and is_there == (shown.get(upload.key) == upload.ending):
                journal.fail("check", f"upload {upload.upload_id} is {is_there=} and {upload.key} {shown[upload.key]}")
            if not is_there and not upload.is_ending:
                journal.fail("check", f"upload {upload.upload_id} of {upload.key} is gone")
            if not is_there:
                world.end(writer, upload)
            upload.is_ending, upload.ending = False, None
    for upload_id, key in found.items():
        if key not in world.begun:
            journal.fail("check", f"upload {upload_id} of {key} was never begun, or is over")
            continue
        world.begun.remove(key)
        client.call("DELETE", key, f"uploadId={quote(upload_id)}")
    world.begun.clear()


def _check_parts(journal: Journal, client: Client, upload: Upload) -> None:
    reply = client.call("GET", upload.key, f"uploadId={quote(upload.upload_id)}")
    if reply.status != 200:
        journal.fail("check", f"ListParts of {upload.upload_id}: {reply.status} {error_code(reply)}")
        return
    found: _Parts = {}
    for item in tree(reply).iterfind("Part"):
        etag = (item.findtext("ETag") or "").strip('"')
        found[int(item.findtext("PartNumber") or 0)] = (etag, int(item.findtext("Size") or -1))
    for number in upload.parts.keys() | found.keys():
        states = upload.parts.get(number, [None])
        kept = [state for state in states if _part_shown(state) == found.get(number)]
        if not kept:
            journal.fail("check", f"part {number} of {upload.upload_id} is {found.get(number)}, allowed are {states}")
        upload.parts[number] = kept[:1]


def _part_shown(part: SentPart | None) -> tuple[str, int] | None:
    return None if part is None else (part.etag, part.piece.nbytes)


def _check_ended(journal: Journal, client: Client, upload: Upload) -> None:
    query = f"uploadId={quote(upload.upload_id)}"
    attempts = [("GET", query, b""), ("PUT", f"partNumber=1&{query}", b"late"), ("DELETE", query, b"")]
    for method, sent, body in attempts:
        reply = client.call(method, upload.key, sent, body=body)
        if error_code(reply) != "NoSuchUpload":
            journal.fail("check", f"{method} with the id of an upload that is over: {reply.status}")
