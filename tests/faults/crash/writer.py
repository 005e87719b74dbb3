"""A client that changes objects: puts, deletes, copies, tags, conditions; some keys its own, some contested."""

from __future__ import annotations

import hashlib
import threading
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from urllib.parse import quote
from xml.sax.saxutils import escape

from descriptors.headers import CHUNK_HEADER
from tests.faults.crash.client import Client, NoAnswerError, error_code, tree
from tests.faults.crash.journal import Operation
from tests.faults.crash.model import Shown
from tests.faults.crash.versions import SMALL_BYTES_MAX, Piece, Version, md5, pairs, random_size
from tests.faults.crash.world import BUCKET, CONTESTED_KEYS, World, own_keys
from tests.support.requests import Reply

SLOW_CHANCE = 0.2
COMMON_CHANCE = 0.3


class Writer(threading.Thread):
    """Runs until told to stop, or until the server answers no more."""

    def __init__(self, world: World, url: str, index: int, seed: int) -> None:
        super().__init__(name=f"writer-{index}", daemon=True)
        self.world = world
        self.journal = world.journal
        self.index = index
        self.rng = Random(seed)
        self.client = Client(url, BUCKET, world.killed)
        self.keys = own_keys(index)
        self._steps: list[tuple[float, Callable[[], None]]] = [
            (8, self._put),
            (2, self._put_if_absent),
            (2, self._put_if_match),
            (2, self._delete_one),
            (1, self._delete_many),
            (2, self._copy),
            (1, self._copy_onto_itself),
            (2, self._set_tags),
            (3, self._contested),
        ]

    def add_steps(self, steps: list[tuple[float, Callable[[], None]]]) -> None:
        """More kinds of step, with their weights."""
        self._steps += steps

    def run(self) -> None:
        """Step after step."""
        try:
            while not (self.world.stop.is_set() or self.journal.failures):
                weights = [weight for weight, _ in self._steps]
                self.rng.choices([step for _, step in self._steps], weights)[0]()
        except NoAnswerError as error:
            if not self.world.killed.is_set():
                self.journal.fail(self.name, f"a living server did not answer: {error}")
        except Exception as error:
            self.journal.fail(self.name, f"{type(error).__name__}: {error}")
            raise
        finally:
            self.client.close()

    def present(self) -> list[tuple[str, Version]]:
        """Own keys that are sure to show an object."""
        found = []
        for key in self.keys:
            history = self.journal.histories.get(key)
            if history is not None and history.is_sure and history.last is not None:
                found.append((key, history.last))
        return found

    def sure_key(self) -> str | None:
        """An own key whose state is certain."""
        sure = [key for key in self.keys if key not in self.journal.histories or self.journal.histories[key].is_sure]
        return self.rng.choice(sure) if sure else None

    def state(self, key: str) -> Shown:
        """What an own key shows."""
        return self.journal.histories[key].last if key in self.journal.histories else None

    def new_piece(self, nbytes: int) -> tuple[Piece, bytes]:
        """Bytes nobody has had or, now and then, those that others of this length have, too."""
        is_common = self.rng.random() < COMMON_CHANCE
        piece = Piece(self.world.common_seed if is_common else self.world.new_seed(), nbytes)
        return piece, piece.body()

    def new_metadata(self) -> dict[str, str]:
        """Names the write, so that two versions of the same bytes differ."""
        return {"op": str(self.world.new_seed())}

    def new_tags(self) -> dict[str, str]:
        """None, or a few."""
        return {f"t{index}": f"{self.rng.random():.6f}" for index in range(self.rng.choice((0, 0, 1, 3)))}

    def carry_out(
        self,
        kind: str,
        results: Mapping[str, Shown],
        send: Callable[[], Reply],
        *,
        refusals: tuple[str, ...] = (),
        must_refuse: bool = False,
    ) -> Reply | None:
        """Write down, send, write down. The answer, or None for a refusal that was allowed; anything else fails."""
        operation = self.journal.begin(self.name, kind, results)
        reply = send()
        return self.judge(operation, reply, refusals, must_refuse=must_refuse)

    def judge(
        self, operation: Operation, reply: Reply, refusals: tuple[str, ...] = (), *, must_refuse: bool = False
    ) -> Reply | None:
        """See `carry_out`. An answer of 200 may hold an error (CopyObject, CompleteMultipartUpload)."""
        code = error_code(reply) if reply.body.startswith(b"<") else str(reply.status)
        if reply.status < 300 and code.isdigit():
            self.journal.acknowledge(self.name, operation)
            if must_refuse:
                self.journal.fail(self.name, f"{operation.kind} {operation.number} should have been refused")
            return reply
        if code in refusals:
            self.journal.refuse(self.name, operation)
            return None
        self.journal.fail(self.name, f"{operation.kind} {operation.number}: {reply.status} {code} {reply.body[:300]!r}")
        return None

    def new_version(self, nbytes: int) -> tuple[Version, bytes, dict[str, str]]:
        """A version, its bytes and the headers that make it."""
        piece, body = self.new_piece(nbytes)
        metadata, tags = self.new_metadata(), self.new_tags()
        version = Version((piece,), md5(body), pairs(metadata), pairs(tags), "application/x-crash")
        headers = {"content-type": "application/x-crash", CHUNK_HEADER: "true"} | headers_for(metadata, tags)
        return version, body, headers

    def put(self, key: str, nbytes: int, condition: Mapping[str, str], *refusals: str, must_refuse: bool) -> None:
        """One put; sometimes slowly, so that it can be cut in its middle."""
        version, body, headers = self.new_version(nbytes)
        slowly = self.rng if nbytes and self.rng.random() < SLOW_CHANCE else None
        reply = self.carry_out(
            "put",
            {key: version},
            lambda: self.client.call("PUT", key, body=body, headers=headers | dict(condition), slowly=slowly),
            refusals=refusals,
            must_refuse=must_refuse,
        )
        if reply is not None and reply.headers["etag"] != f'"{version.etag}"':
            self.journal.fail(self.name, f"put of {key}: ETag {reply.headers['etag']}, not {version.etag}")

    def _put(self) -> None:
        key = self.sure_key()
        if key is not None:
            self.put(key, random_size(self.rng), {}, must_refuse=False)

    def _put_if_absent(self) -> None:
        key = self.sure_key()
        if key is not None:
            exists = self.state(key) is not None
            refusals = ("PreconditionFailed",) if exists else ()
            size = self.rng.randrange(SMALL_BYTES_MAX)
            self.put(key, 10 if exists else size, {"if-none-match": "*"}, *refusals, must_refuse=exists)

    def _put_if_match(self) -> None:
        for key, version in self.rng.sample(self.present(), min(1, len(self.present()))):
            matches = self.rng.random() < 0.6
            etag = version.etag if matches else "0" * 32
            refusals = () if matches else ("PreconditionFailed",)
            size = random_size(self.rng) if matches else 100
            self.put(key, size, {"if-match": f'"{etag}"'}, *refusals, must_refuse=not matches)

    def _delete_one(self) -> None:
        key = self.sure_key()
        if key is not None:
            self.carry_out("delete", {key: None}, lambda: self.client.call("DELETE", key))

    def _delete_many(self) -> None:
        keys = self.rng.sample(self.keys, self.rng.randrange(1, 5))
        items = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
        body = f"<Delete>{items}</Delete>".encode()
        headers = {"content-md5": b64encode(hashlib.md5(body).digest()).decode()}
        reply = self.carry_out(
            "multi-delete",
            dict.fromkeys(keys),
            lambda: self.client.call("POST", query="delete=", body=body, headers=headers),
        )
        if reply is not None and {item.text for item in tree(reply).iterfind("Deleted/Key")} != set(keys):
            self.journal.fail(self.name, f"the answer to a multi-delete of {keys} names others: {reply.body!r}")

    def _copy(self) -> None:
        target = self.sure_key()
        sources = self.present()
        if target is None or not sources:
            return
        key, source = self.rng.choice(sources)
        version = source.copied()
        headers = {"x-amz-copy-source": quote(f"/{BUCKET}/{key}")}
        if key == target or self.rng.random() < 0.5:
            version, more = self._described_anew(version)
            headers |= more
        self.carry_out("copy", {target: version}, lambda: self.client.call("PUT", target, headers=headers))

    def _copy_onto_itself(self) -> None:
        for key, before in self.rng.sample(self.present(), min(1, len(self.present()))):
            version, more = self._described_anew(before.copied())
            headers = {"x-amz-copy-source": quote(f"/{BUCKET}/{key}")} | more
            self.carry_out(
                "self-copy",
                {key: version},
                lambda key=key, headers=headers: self.client.call("PUT", key, headers=headers),  # type: ignore[misc]
            )

    def _described_anew(self, version: Version) -> tuple[Version, dict[str, str]]:
        metadata, tags = self.new_metadata(), self.new_tags()
        changed = replace(version, metadata=pairs(metadata), tags=pairs(tags), content_type="text/x-copied")
        directives = {"x-amz-metadata-directive": "REPLACE", "x-amz-tagging-directive": "REPLACE"}
        return changed, {"content-type": "text/x-copied"} | directives | headers_for(metadata, tags)

    def _set_tags(self) -> None:
        for key, version in self.rng.sample(self.present(), min(1, len(self.present()))):
            tags = self.new_tags()
            items = "".join(f"<Tag><Key>{name}</Key><Value>{value}</Value></Tag>" for name, value in tags.items())
            body = f"<Tagging><TagSet>{items}</TagSet></Tagging>".encode()
            method, sent = ("PUT", body) if tags else ("DELETE", b"")
            self.carry_out(
                "tag",
                {key: replace(version, tags=pairs(tags))},
                lambda key=key, method=method, sent=sent: self.client.call(  # type: ignore[misc]
                    method, key, "tagging=", body=sent
                ),
            )

    def _contested(self) -> None:
        """Blind writes and puts on condition of absence: others write the same keys at the same time."""
        key = self.rng.choice(CONTESTED_KEYS)
        kind = self.rng.random()
        if kind < 0.2:
            self.carry_out("delete", {key: None}, lambda: self.client.call("DELETE", key))
        elif kind < 0.35:
            self.put(key, 1000, {"if-none-match": "*"}, "PreconditionFailed", must_refuse=False)
        else:
            self.put(key, self.rng.randrange(4 * SMALL_BYTES_MAX), {}, must_refuse=False)


def headers_for(metadata: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request that makes an object or an upload."""
    headers = {f"x-amz-meta-{name}": value for name, value in metadata.items()}
    if tags:
        headers["x-amz-tagging"] = "&".join(f"{name}={value}" for name, value in tags.items())
    return headers
