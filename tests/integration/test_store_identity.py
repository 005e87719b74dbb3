"""An index that does not know the files beside it: what the command does, and other processes that read the index."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import stack
from tests.support.store_bed import opened, put, remove_index
from tests.support.tree import repository


@pytest.mark.slow
def test_the_command_says_what_to_do_and_does_it_when_told(tmp_path: Path) -> None:
    """One line, no traceback; and with the option the server starts."""
    with stack("together", tmp_path) as running:
        running.s3().create_bucket(Bucket="kept")
        running.s3().put_object(Bucket="kept", Key="k", Body=b"x")
    remove_index(tmp_path / "data")
    command = [sys.executable, "-m", "objectcache", "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=repository())
    assert refused.returncode == 1
    assert "--adopt-index" in refused.stderr
    assert "Traceback" not in refused.stderr
    with subprocess.Popen([*command, "--adopt-index"], stdout=subprocess.PIPE, text=True, cwd=repository()) as adopted:
        assert adopted.stdout is not None
        assert "is listening on" in adopted.stdout.readline()
        adopted.terminate()
        assert adopted.wait(30) == 0
    assert len(list((tmp_path / "data" / "set-aside").iterdir())) == 1


async def test_another_process_that_reads_the_index_takes_nothing_away(tmp_path: Path) -> None:
    """SQLite's locks end when the process that holds them closes any descriptor of the file: a reader elsewhere that
    ends then takes itself for the last one, and removes the log that is being written.
    """
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    read = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('SELECT 1 FROM objects'); db.close()"
    for number in range(3):
        await put(store, f"key-{number}", b"x")
        command = [sys.executable, "-c", read, str(tmp_path / "index.sqlite3")]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=60)
        assert (tmp_path / "index.sqlite3-wal").exists()
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in tmp_path.glob("index.sqlite3*"):  # noqa: ASYNC240
        shutil.copy(path, copied)
    database = sqlite3.connect(copied / "index.sqlite3")
    assert database.execute("SELECT count(*) FROM objects").fetchone() == (3,)
    database.close()
    store.close()
