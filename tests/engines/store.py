"""A server and a bucket for engines, which tests damage, stop and kill."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.beds.connector_extra import extra_config
from nixl_client.client import Client
from tests.engines.messages import Json
from tests.faults.crash.server import Server
from tests.support.requests import OWNER, s3_client
from tests.support.servers import CONFIG

BUCKET = "kv-cache"


@dataclass
class Store:
    """A running server; `data` is its data directory as this process sees it."""

    server: Server
    endpoint: str
    data: Path

    def connector(self, **options: Json) -> dict[str, Json]:
        """The connector's options."""
        return connector_options(self.endpoint, **options)

    def tier(self, **options: Json) -> dict[str, Json]:
        """The options of vLLM's tier."""
        return tier_options(self.endpoint, **options)

    def stop(self) -> None:
        """It hangs."""
        os.kill(self.server.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """It hangs no longer."""
        os.kill(self.server.pid, signal.SIGCONT)

    def keys(self) -> set[str]:
        """Everything stored."""
        s3 = s3_client(self.endpoint)
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {entry["Key"] for page in pages for entry in page.get("Contents", ())}

    def sizes(self, keys: Collection[str] | None = None) -> set[int]:
        """The sizes of everything stored, or of these objects."""
        s3 = s3_client(self.endpoint)
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        entries = [entry for page in pages for entry in page.get("Contents", ())]
        return {entry["Size"] for entry in entries if keys is None or entry["Key"] in keys}

    def get(self, key: str) -> bytes:
        """An object."""
        return bytes(s3_client(self.endpoint).get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def put(self, key: str, body: bytes) -> None:
        """Put an object, past every check of what it means."""
        with Client(self.endpoint, BUCKET, access_key=OWNER[0], secret_key=OWNER[1]) as client:
            client.put_chunks([key], [bytearray(body)])

    def delete(self, *keys: str) -> None:
        """Delete objects."""
        s3 = s3_client(self.endpoint)
        for key in keys:
            s3.delete_object(Bucket=BUCKET, Key=key)

    def damage(self, key: str, offset: int) -> None:
        """Flip a bit of a stored object on disk."""
        sql = (
            "SELECT file_id, file_offset + ? - object_offset FROM extents WHERE ? >= object_offset AND version ="
            " (SELECT version FROM objects WHERE bucket = ? AND key = ?) ORDER BY object_offset DESC"
        )
        with contextlib.closing(sqlite3.connect(self.data / "index.sqlite3")) as database:
            file_id, at = database.execute(sql, (offset, offset, BUCKET, key)).fetchone()
        with (self.data / "extents" / file_id[:2] / file_id).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x20]))


@contextlib.contextmanager
def running_store(
    folder: Path,
    *,
    data: Path | None = None,
    config: str = "",
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
    port: int = 0,
) -> Iterator[Store]:
    """A server, killed with the block. `config` goes before the credentials, `prefix` is a command that runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.toml"
    file.write_text(f'{config}[storage]\ndurability = "relaxed"\n{CONFIG}')
    where = ("--port", str(port)) if port else ()
    server = Server(folder, file, data, prefix, (*where, *options))
    try:
        endpoint = server.url()
        s3 = s3_client(endpoint)
        with contextlib.suppress(s3.exceptions.BucketAlreadyOwnedByYou):
            s3.create_bucket(Bucket=BUCKET)
        yield Store(server, endpoint, data or folder / "data")
    finally:
        server.kill()


def every_key(store: Store) -> list[str]:
    """All objects."""
    return sorted(store.keys())


def object_keys(store: Store) -> set[str]:
    """The chunks that are stored: all but what says how engines hash."""
    return {key for key in every_key(store) if not key.endswith("/about")}


def connector_options(endpoint: str, **options: Json) -> dict[str, Json]:
    """kv_connector_extra_config; the server need not be there. Waits are so long that a busy machine ends none, and all
    that is stored is loaded: what is worth loading depends on the machine.
    """
    return extra_config(
        {
            "endpoint": endpoint,
            "bucket": BUCKET,
            "model": "tiny",
            "staging_bytes": 16 << 20,
            "lookup_timeout_s": 30.0,
            "load_timeout_s": 60.0,
            "load": "all",
            **options,
        }
    )


def tier_options(endpoint: str, **options: Json) -> dict[str, Json]:
    """vLLM's kv_connector_extra_config for its tier: a small primary tier, and waits that no busy machine ends."""
    waits: dict[str, Json] = {"lookup_timeout_s": 30.0, "store_wait_s": 60.0, "retry_s": 0.5}
    engine = {
        name: options.pop(name)
        for name in ("blocks_per_chunk", "canonical_layout", "cpu_bytes_to_use")
        if name in options
    }
    internals = options.pop("internals", {})
    assert isinstance(internals, dict)
    return {
        "spec_name": "ObjectCacheTieringSpec",
        "spec_module_path": "nixl_client.connectors.vllm_tier",
        "cpu_bytes_to_use": 128 << 20,
        "endpoint": endpoint,
        "bucket": BUCKET,
        "load_timeout_s": 60.0,
        "internals": {**waits, **internals},
        **engine,
        **options,
    }
