"""Comparing what the server shows with what it may show; and clients that read while others write."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from random import Random
from urllib.parse import quote

from tests.faults.crash.client import Client, NoAnswerError, error_code, tree
from tests.faults.crash.model import Shown
from tests.faults.crash.versions import Version, pairs
from tests.faults.crash.world import BUCKET, World
from tests.support.requests import Reply

LIST_PAGE_KEYS = 7
PAGES_MAX = 1000


def described(reply: Reply) -> tuple[str, int, tuple[tuple[str, str], ...], str]:
    """ETag, size, metadata and content type of an answer to GET or HEAD."""
    metadata = {
        name.removeprefix("x-amz-meta-"): value
        for name, value in reply.headers.items()
        if name.startswith("x-amz-meta-")
    }
    span = reply.headers.get("content-range")
    nbytes = int(span.rpartition("/")[2] if span else reply.headers["content-length"])
    return reply.headers["etag"].strip('"'), nbytes, pairs(metadata), reply.headers["content-type"]


def matching(reply: Reply, allowed: Iterable[Shown], *, start: int = 0, has_body: bool = True) -> list[Shown]:
    """The allowed states this answer may be of; for a GET every byte is compared, from `start` on."""
    if reply.status == 404 and (not reply.body or error_code(reply) == "NoSuchKey"):
        return [None] if None in allowed else []
    if reply.status not in (200, 206):
        return []
    shown = described(reply)
    found: list[Shown] = []
    for version in allowed:
        if version is None or shown != (version.etag, version.nbytes, version.metadata, version.content_type):
            continue
        if int(reply.headers.get("x-amz-tagging-count", "0")) != len(version.tags):
            continue
        if not has_body or version.body()[start : start + len(reply.body)] == reply.body:
            found.append(version)
    return found


def tags_of(reply: Reply) -> tuple[tuple[str, str], ...]:
    """The answer to GetObjectTagging."""
    tags = tree(reply).iterfind("TagSet/Tag")
    return pairs({tag.findtext("Key") or "": tag.findtext("Value") or "" for tag in tags})


def listed(client: Client, page_keys: int = LIST_PAGE_KEYS) -> dict[str, tuple[str, int]]:
    """ETag and size of every key, over several pages."""
    found: dict[str, tuple[str, int]] = {}
    query = f"list-type=2&max-keys={page_keys}"
    more = ""
    for _ in range(PAGES_MAX):
        root = tree(client.call("GET", query=query + more))
        for item in root.iterfind("Contents"):
            etag = (item.findtext("ETag") or "").strip('"')
            found[item.findtext("Key") or ""] = (etag, int(item.findtext("Size") or -1))
        token = root.findtext("NextContinuationToken")
        if token is None:
            return found
        more = f"&continuation-token={quote(token, safe='')}"
    raise AssertionError("the list does not end")


def listed_as(version: Version) -> tuple[str, int]:
    """A list's entry."""
    return version.etag, version.nbytes


class Reader(threading.Thread):
    """Reads at random until told to stop: whatever it sees must be some allowed state, whole."""

    def __init__(self, world: World, url: str, seed: int) -> None:
        super().__init__(name="reader", daemon=True)
        self._world = world
        self._journal = world.journal
        self._rng = Random(seed)
        self._client = Client(url, BUCKET, world.killed)

    def run(self) -> None:
        """Read after read."""
        try:
            while not (self._world.stop.is_set() or self._journal.failures):
                self._rng.choice((self._read, self._read, self._read_range, self._list))()
        except NoAnswerError as error:
            if not self._world.killed.is_set():
                self._journal.fail(self.name, f"a living server did not answer: {error}")
        except Exception as error:
            self._journal.fail(self.name, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._client.close()

    def _key(self) -> str:
        keys = list(self._journal.histories)
        return self._rng.choice(keys) if keys else "hot/1"

    def _read(self) -> None:
        key = self._key()
        began = self._journal.tick()
        reply = self._client.call(self._rng.choice(("GET", "GET", "HEAD")), key)
        has_body = bool(reply.body)
        allowed = self._journal.allowed(key, began, self._journal.tick())
        if not matching(reply, allowed, has_body=has_body):
            self._journal.fail(self.name, explained(key, reply, allowed))

    def _read_range(self) -> None:
        key = self._key()
        began = self._journal.tick()
        start = self._rng.randrange(100_000)
        reply = self._client.call("GET", key, headers={"range": f"bytes={start}-{start + 20_000}"})
        allowed = self._journal.allowed(key, began, self._journal.tick())
        if reply.status == 416:
            if not any(version is not None and version.nbytes <= start for version in allowed):
                self._journal.fail(self.name, explained(key, reply, allowed))
        elif not matching(reply, allowed, start=start):
            self._journal.fail(self.name, explained(key, reply, allowed))

    def _list(self) -> None:
        began = self._journal.tick()
        found = listed(self._client, self._rng.choice((3, 1000)))
        ended = self._journal.tick()
        for key in self._journal.histories.copy():
            allowed = self._journal.allowed(key, began, ended)
            shown = found.get(key)
            if shown not in [None if version is None else listed_as(version) for version in allowed]:
                states = [str(one) for one in allowed]
                self._journal.fail(self.name, f"the list shows {key} as {shown}, allowed are {states}")


def explained(key: str, reply: Reply, allowed: Iterable[Shown]) -> str:
    """What was wrong with an answer."""
    body = f"{len(reply.body)} B" if reply.status in (200, 206) else repr(reply.body[:200])
    return f"{key} shows {reply.status} {reply.headers} {body}; allowed are {[str(one) for one in allowed]}"
