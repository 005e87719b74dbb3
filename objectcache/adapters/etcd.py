"""A thin client of etcd's JSON gateway (`/v3/`), over aiohttp: ranges, writes with leases, and watches.

Numbers of 64 bits come as text, and fields that are zero or empty are left out. A write that timed out may have been
carried out. Source: etcd 3.4's gRPC gateway; docs/guides/cluster.md says which versions are tried.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from objectcache.adapters.careful_session import careful_session
from objectcache.adapters.whole_answers import UNENCODED, LongAnswerError, read_whole

CALL_S = 5.0
CONNECT_S = 2.0
WATCH_S = 30.0
"""A watch without a word for so long is begun again, maybe elsewhere: its host may be gone."""
ENTRIES_MAX = 2_048
"""A page of a range has no more: a cluster has 1,024 members."""
PAGE_ENTRIES, PAGE_LESS = 64, 8
"""A range begins with so many entries in a page. The next page has twice as many, or an eighth where the answer was too
long: anybody who may write to etcd chooses how long values are.
"""
VALUE_BYTES_MAX = 64 << 10
"""A range leaves longer values out: nobody here has use for them."""
ANSWER_BYTES_MAX = LINE_BYTES_MAX = 8 << 20
VALUES_MAX = 8 * ENTRIES_MAX
"""So many values of JSON are parsed at once. Anybody who may write to etcd chooses how many there are, and the event
loop parses so many in a few milliseconds.
"""
LINES_AT_ONCE = 64
"""So many lines of a watch are given without giving the event loop a turn. A read brings tens of thousands of short
ones, and whoever is behind etcd's address decides how short they are.
"""
_OLD_TOKEN = "revision of auth store is old"
_GONE = (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError)
"""Another endpoint may answer where one fails so."""


class EtcdError(Exception):
    """etcd did not answer, or refused; the message has its own words."""


class _TokenError(EtcdError):
    """etcd does not take the token, or wants one."""


class CompactedError(EtcdError):
    """The revision from which a watch was to begin is no longer kept."""


class QuietWatchError(EtcdError):
    """Nothing came for so long that the watch's host may be gone."""


class ManyValuesError(EtcdError):
    """An answer has more values than are parsed."""


@dataclass(frozen=True, slots=True)
class EtcdEntry:
    """A key with its value, the revision of its last change, and its lease (0: none)."""

    key: str
    value: bytes
    revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class EtcdRange:
    """The entries under a prefix at a revision. `cluster_id` is etcd's own; one that was rebuilt has another."""

    cluster_id: int
    revision: int
    entries: tuple[EtcdEntry, ...]


@dataclass(frozen=True, slots=True)
class EtcdChange:
    """One change of a key: its new value, or None where it was deleted."""

    key: str
    value: bytes | None
    revision: int


class Etcd:
    """One cluster of etcd, at any of its endpoints. `start` before use, `close` after. Used on one event loop."""

    def __init__(
        self,
        endpoints: Sequence[str],
        account: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        call_s: float = CALL_S,
        watch_s: float = WATCH_S,
    ) -> None:
        self._endpoints = list(endpoints)
        self._account = account
        self._tls = tls
        self._call_s = call_s
        self._watch_s = watch_s
        self._token: str | None = None
        self._session: aiohttp.ClientSession | None = None

    def copy(self, call_s_max: float) -> Etcd:
        """The same cluster of etcd, for another event loop, with calls of at most so long."""
        call_s = min(self._call_s, call_s_max)
        return Etcd(self._endpoints, self._account, self._tls, call_s, self._watch_s)

    async def start(self) -> None:
        """Open the connection pool."""
        connector = aiohttp.TCPConnector(limit=64, ssl=self._tls or True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = careful_session(connector, timeout=timeout, headers=UNENCODED)

    async def close(self) -> None:
        """Close the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def range(self, prefix: str, entries_max: int = ENTRIES_MAX) -> EtcdRange:
        """The entries under a prefix, as of now: a majority of etcd agrees. They come in pages, all of the first one's
        revision; a value of more than VALUE_BYTES_MAX comes empty. Raises EtcdError, also where there are more than
        `entries_max`.
        """
        bounds = {"key": _b64(prefix), "range_end": _b64(_after(prefix))}
        entries: list[EtcdEntry] = []
        cluster_id = revision = 0
        limit = PAGE_ENTRIES
        while True:
            try:
                answer = await self.call("kv/range", {**bounds, "limit": str(limit)})
            except EtcdError as error:
                if limit == 1 or not isinstance(error.__cause__, LongAnswerError):
                    raise
                limit = max(1, limit // PAGE_LESS)
                continue
            limit = min(ENTRIES_MAX, 2 * limit)
            try:
                found = answer.get("kvs", ())
                entries += map(_short_entry, found)
                if not revision:
                    cluster_id, revision = int(answer["header"]["cluster_id"]), int(answer["header"]["revision"])
                if len(entries) > entries_max or (answer.get("more") and len(entries) == entries_max):
                    raise EtcdError(f"there are more than {entries_max} entries under {prefix}")
                if not answer.get("more"):
                    return EtcdRange(cluster_id, revision, tuple(entries))
                after_last = base64.b64decode(found[-1]["key"]) + b"\0"
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise _senseless(error) from error
            bounds |= {"key": base64.b64encode(after_last).decode(), "revision": str(revision)}

    async def latest(self, prefix: str, before: EtcdRange) -> EtcdRange:
        """The entries under a prefix as `range` reads them, where `before` is an earlier reading: the same tuple of
        entries if none has been written or deleted since, which costs etcd one number and no entries. Raises EtcdError.
        """
        written_since = {"min_mod_revision": str(before.revision + 1), "keys_only": True}
        answer = await self.call("kv/range", {"key": _b64(prefix), "range_end": _b64(_after(prefix)), **written_since})
        try:
            header = answer["header"]
            revision, count = int(header["revision"]), int(answer.get("count", 0))
            is_same_etcd = int(header["cluster_id"]) == before.cluster_id and revision >= before.revision
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _senseless(error) from error
        # a key that was deleted and made again has been written since: of as many keys as before none is missing
        if is_same_etcd and not answer.get("kvs") and count == len(before.entries):
            return replace(before, revision=revision)
        return await self.range(prefix)

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Set a key. Raises EtcdError."""
        await self.call("kv/put", {"key": _b64(key), "value": _b64(value), "lease": str(lease)})

    async def create(self, key: str, value: bytes, lease: int = 0) -> EtcdEntry | None:
        """Set a key that does not exist; the entry that does, where there is one. Raises EtcdError."""
        answer = await self.call(
            "kv/txn",
            {
                "compare": [{"key": _b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                "success": [{"request_put": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}],
                "failure": [{"request_range": {"key": _b64(key)}}],
            },
        )
        if answer.get("succeeded"):
            return None
        return _entry(answer["responses"][0]["response_range"]["kvs"][0])

    async def replace(self, before: EtcdEntry, value: bytes, lease: int = 0) -> bool:
        """Set a key that has not changed since `before`; whether that was so. Raises EtcdError."""
        key, revision = _b64(before.key), str(before.revision)
        answer = await self.call(
            "kv/txn",
            {
                "compare": [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}],
                "success": [{"request_put": {"key": key, "value": _b64(value), "lease": str(lease)}}],
            },
        )
        return bool(answer.get("succeeded"))

    async def delete(self, key: str) -> bool:
        """Delete a key; whether it was there. Raises EtcdError."""
        answer = await self.call("kv/deleterange", {"key": _b64(key)})
        return int(answer.get("deleted", 0)) > 0

    async def grant(self, ttl_s: int) -> int:
        """A new lease, of at least 2 s. Raises EtcdError."""
        return int((await self.call("lease/grant", {"TTL": str(ttl_s)}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; False where it has ended. Raises EtcdError."""
        answer = await self.call("lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it its keys. Raises EtcdError."""
        await self.call("lease/revoke", {"ID": str(lease)})

    async def watch(self, prefix: str, revision: int, cluster_id: int = 0) -> AsyncIterator[list[EtcdChange]]:
        """The changes under a prefix from a revision on, as they are made. Raises EtcdError when the connection ends,
        and where etcd is not the cluster of this id; QuietWatchError when nothing comes for `watch_s`; CompactedError;
        LongAnswerError for more changes at once than are parsed.
        """
        body = {
            "create_request": {
                "key": _b64(prefix),
                "range_end": _b64(_after(prefix)),
                "start_revision": str(revision),
                "progress_notify": True,
            }
        }
        endpoint = self._endpoints[0]
        try:
            quiet = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._watch_s)
            async with self._open().post(
                f"{endpoint}/v3/watch", json=body, headers=self._headers(), timeout=quiet, allow_redirects=False
            ) as response:
                await _require_good(response)
                async for line in _lines(response):
                    result = parsed_answer(line).get("result", {})
                    if cluster_id and int(result.get("header", {}).get("cluster_id", cluster_id)) != cluster_id:
                        raise EtcdError(f"{endpoint}: etcd has been rebuilt")
                    if result.get("canceled"):
                        kind = CompactedError if result.get("compact_revision") else EtcdError
                        raise kind(result.get("cancel_reason", "the watch was cancelled"))
                    changes = [_change(each) for each in result.get("events", ())]
                    if changes:
                        yield changes
        except _TokenError:
            self._token = None
            raise
        except aiohttp.SocketTimeoutError as error:
            self._rotate(endpoint)
            raise QuietWatchError(f"{endpoint}: nothing for {self._watch_s:g} s") from error
        except _GONE as error:
            self._rotate(endpoint)
            raise EtcdError(f"{endpoint}: {str(error) or type(error).__name__}") from error
        raise EtcdError(f"{endpoint}: the watch ended")

    async def call(self, path: str, body: Mapping[str, Any]) -> Any:
        """One call, at the first endpoint that answers. Raises EtcdError."""
        problem: EtcdError | None = None
        for _ in self._endpoints:
            endpoint = self._endpoints[0]
            try:
                return await self._call_at(endpoint, path, body)
            except _GONE as error:
                problem = EtcdError(f"{endpoint}: {str(error) or type(error).__name__}")
                problem.__cause__ = error
                self._rotate(endpoint)
        raise problem or EtcdError("no endpoint of etcd is named")

    async def _call_at(self, endpoint: str, path: str, body: Mapping[str, Any]) -> Any:
        async with asyncio.timeout(self._call_s):
            is_new = self._account is not None and self._token is None
            if is_new:
                await self._authenticate(endpoint)
            try:
                return await self._post(endpoint, path, body)
            except _TokenError:  # it has expired, etcd was started again, or accounts have changed
                if is_new or self._account is None:
                    raise
                await self._authenticate(endpoint)
                return await self._post(endpoint, path, body)

    async def _post(self, endpoint: str, path: str, body: Mapping[str, Any]) -> Any:
        url, headers = f"{endpoint}/v3/{path}", self._headers()
        async with self._open().post(url, json=body, headers=headers, allow_redirects=False) as response:
            await _require_good(response)
            return parsed_answer(await read_whole(response, ANSWER_BYTES_MAX))

    async def _authenticate(self, endpoint: str) -> None:
        name, password = self._account or ("", "")
        body = {"name": name, "password": password}
        url = f"{endpoint}/v3/auth/authenticate"
        async with self._open().post(url, json=body, allow_redirects=False) as response:
            await _require_good(response)
            token = parsed_answer(await read_whole(response, ANSWER_BYTES_MAX)).get("token")
            if not isinstance(token, str):
                raise EtcdError("etcd's answer has no token")
            self._token = token

    def _headers(self) -> dict[str, str]:
        return {} if self._token is None else {"authorization": self._token}

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("start() was not called")
        return self._session

    def _rotate(self, failed: str) -> None:
        """Ask another endpoint next time."""
        if self._endpoints[0] == failed:
            self._endpoints.append(self._endpoints.pop(0))


async def _require_good(response: aiohttp.ClientResponse) -> None:
    """Raises aiohttp.ClientError where another endpoint may answer (503), EtcdError where none will."""
    if response.status == 200:
        return
    text = (await response.content.read(4096)).decode(errors="replace")
    if response.status == 503:
        raise aiohttp.ClientError(f"{response.status}: {text}")
    kind = _TokenError if response.status == 401 or _OLD_TOKEN in text else EtcdError
    raise kind(f"{response.status}: {text}")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of an answer that does not end. aiohttp's own iterator breaks at long ones."""
    pending = bytearray()
    async for piece in response.content.iter_any():
        *ends, rest = piece.split(b"\n")
        for count, end in enumerate(ends, start=1):
            if not count % LINES_AT_ONCE:
                await asyncio.sleep(0)
            line = bytes(pending) + end
            pending.clear()
            if line.strip():
                yield line
        pending += rest  # in place: a long line may come byte by byte
        if len(pending) > LINE_BYTES_MAX:
            raise EtcdError(f"etcd sent a line of more than {LINE_BYTES_MAX} bytes")


def parsed_answer(text: bytes) -> Any:
    """The JSON object of an answer. Keys and values are base64 in it, so what looks like a list or an object is one.

    Raises EtcdError, json.JSONDecodeError.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > VALUES_MAX:
        raise ManyValuesError(f"etcd's answer has more than {VALUES_MAX} values")
    try:
        found = json.loads(text)
    except RecursionError:
        raise EtcdError("etcd's answer is nested too deep") from None
    except UnicodeDecodeError as error:
        raise EtcdError(f"etcd's answer is no UTF-8: {error.reason}") from None
    if not isinstance(found, dict):
        raise EtcdError("etcd's answer is no JSON object")
    return found


def _senseless(error: Exception) -> EtcdError:
    return EtcdError(f"etcd's answer makes no sense: {type(error).__name__} {error}")


def _b64(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _after(prefix: str) -> bytes:
    """The key that ends a range of all keys with this prefix."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def entry_in(answer: Mapping[str, Any]) -> EtcdEntry | None:
    """The entry in an answer that has one at most. Raises EtcdError."""
    try:
        found = answer.get("kvs", ())
        return _short_entry(found[0]) if found else None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _senseless(error) from error


def _entry(fields: Mapping[str, Any]) -> EtcdEntry:
    key = base64.b64decode(fields["key"]).decode(errors="replace")
    value = base64.b64decode(fields.get("value", ""))
    return EtcdEntry(key, value, int(fields["mod_revision"]), int(fields.get("lease", 0)))


def _short_entry(fields: Mapping[str, Any]) -> EtcdEntry:
    """The entry, without a value that is too long."""
    is_short = len(fields.get("value", "")) * 3 // 4 <= VALUE_BYTES_MAX
    return _entry(fields if is_short else {**fields, "value": ""})


def _change(fields: Mapping[str, Any]) -> EtcdChange:
    of_key = fields["kv"]
    key = base64.b64decode(of_key["key"]).decode(errors="replace")
    is_deleted = fields.get("type") == "DELETE"
    value = None if is_deleted else base64.b64decode(of_key.get("value", ""))
    return EtcdChange(key, value, int(of_key["mod_revision"]))
