"""Directories that earlier releases wrote are opened and upgraded. tests/data/stores has some, as they were left."""

from __future__ import annotations

import hashlib
import sqlite3
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from descriptors.objects import ReadRequest, UploadListRequest, UploadRef
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.index import migrations
from storage_server.kernel.index.migrations import SCHEMA_VERSION, STEPS, SchemaError, migrate
from storage_server.kernel.index.schema import connect, create
from storage_server.kernel.upkeep.scrub import scrub, stored_bytes
from storage_server.settings import StorageSettings
from tests.support.tree import repository

STORES = sorted((repository() / "tests" / "data" / "stores").glob("*.tar.xz"))
KEY = "OWNER"
each_store = pytest.mark.parametrize("packed", STORES, ids=lambda path: path.name.partition(".")[0])
EXPECTED = {
    **{f"chunk-{index}": (f"chunk-{index}", 98_304) for index in (0, 1, 2, 3, 4, 6)},
    "chunk-5": ("again", 40_000),
    "copy": ("chunk-3", 98_304),
    "large": ("large", 9_000_000),
    "nothing": ("nothing", 0),
}


def number_of(packed: Path) -> int:
    """The schema that a file is named for."""
    return int(packed.name.partition(".")[0].split("-")[1])


def content(name: str, nbytes: int) -> bytes:
    return (hashlib.sha256(name.encode()).digest() * (nbytes // 32 + 1))[:nbytes]


def unpacked(packed: Path, directory: Path) -> Path:
    with tarfile.open(packed) as archive:
        for member in archive:
            stored = archive.extractfile(member)
            if stored is not None:
                path = directory / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(stored.read())
    return directory


def indexes(directory: Path) -> set[str]:
    with closing(sqlite3.connect(directory / "index.sqlite3")) as db:
        return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}


def schema(directory: Path) -> int:
    with closing(sqlite3.connect(directory / "index.sqlite3")) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


async def read(store: EmbeddedStore, key: str) -> bytes:
    async with store.objects.open_object(KEY, ReadRequest("chunks", key)) as opened:
        return b"".join([bytes(piece) async for piece in opened.body])


async def check_everything(store: EmbeddedStore) -> None:
    for key, (name, nbytes) in EXPECTED.items():
        assert await read(store, key) == content(name, nbytes), key
    assert await read(store, "parts") == content("part-1", 5 << 20) + content("part-2", 1000)
    head = await store.objects.head_object(KEY, ReadRequest("chunks", "chunk-3"))
    assert head.info.attributes.headers["content-type"] == "application/x-kv"
    assert [bucket.name for bucket in await store.objects.list_buckets(KEY)] == ["chunks", "empty"]
    (rule,) = await store.objects.get_lifecycle(KEY, "chunks")
    assert rule.rule_id == "r"
    (upload,) = (await store.uploads.list_uploads(KEY, UploadListRequest("chunks"))).uploads
    ref = UploadRef("chunks", upload.key, upload.upload_id)
    (part,) = (await store.uploads.list_parts(KEY, ref, 0, 10)).parts
    assert (upload.key, part.nbytes) == ("unfinished", 2000)


@each_store
async def test_a_directory_of_an_earlier_release_opens_and_is_upgraded(packed: Path, tmp_path: Path) -> None:
    """Objects, copies, parts, unfinished uploads and rules are there, also after the next start."""
    directory = unpacked(packed, tmp_path / "data")
    assert schema(directory) == number_of(packed)
    for _ in range(2):
        store = EmbeddedStore(StorageSettings(data_dir=directory))
        try:
            assert await store.start() == 0
            await check_everything(store)
        finally:
            store.close()
        assert schema(directory) == SCHEMA_VERSION
    assert {"extents_by_place", "extents_unsynced", "uploads_by_key"} <= indexes(directory)
    assert "extents_by_file" not in indexes(directory)
    assert all(checked.damage is None for checked in scrub(directory))


def make_step_fail(monkeypatch: pytest.MonkeyPatch, number: int, statements: Sequence[str]) -> None:
    monkeypatch.setattr(migrations, "STEPS", {number: (*STEPS[number], *statements)})


@each_store
def test_a_step_that_fails_in_the_middle_leaves_the_schema_of_before(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index is the old one, whole: the earlier release opens it, and so does the next try."""
    directory = unpacked(packed, tmp_path / "data")
    before = indexes(directory)
    with monkeypatch.context() as patch:
        make_step_fail(patch, number_of(packed), ["INSERT INTO nowhere VALUES (1)"])
        with closing(connect(directory / "index.sqlite3")) as db, pytest.raises(sqlite3.OperationalError):
            create(db)
    assert (schema(directory), indexes(directory)) == (number_of(packed), before)
    with closing(connect(directory / "index.sqlite3")) as db:
        create(db)
    assert schema(directory) == SCHEMA_VERSION


@pytest.mark.parametrize(
    ("number", "message"), [(99, "go on with that release"), (1, "copy them over S3")], ids=["later", "too early"]
)
def test_an_index_that_cannot_be_upgraded_is_refused_and_left_alone(tmp_path: Path, number: int, message: str) -> None:
    EmbeddedStore(StorageSettings(data_dir=tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / "index.sqlite3")) as db:
        db.execute(f"PRAGMA user_version={number}")
    with pytest.raises(SchemaError, match=rf"schema {number}.*{message}"):
        EmbeddedStore(StorageSettings(data_dir=tmp_path))
    assert schema(tmp_path) == number


def test_only_a_server_upgrades(tmp_path: Path) -> None:
    """What only reads says what to do, and changes nothing."""
    directory = unpacked(STORES[0], tmp_path / "data")
    with pytest.raises(SchemaError, match="start a storage server"):
        stored_bytes(directory)
    assert schema(directory) == 2


def test_a_new_index_has_the_schema_that_upgrades_lead_to(tmp_path: Path) -> None:
    """Table for table, index for index."""

    def described(directory: Path) -> dict[str, str]:
        with closing(sqlite3.connect(directory / "index.sqlite3")) as db:
            rows = db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
            return {
                name: " ".join(sql.split()).replace("( ", "(").replace(" )", ")").replace(" ,", ",")
                for name, sql in rows
            }

    EmbeddedStore(StorageSettings(data_dir=tmp_path / "new")).close()
    upgraded = unpacked(STORES[0], tmp_path / "old")
    with closing(connect(upgraded / "index.sqlite3")) as db:
        migrate(db)
    assert described(tmp_path / "new") == described(upgraded)


def test_the_steps_lead_from_one_number_to_the_next_without_a_gap() -> None:
    assert sorted(STEPS) == list(range(min(STEPS), SCHEMA_VERSION))
