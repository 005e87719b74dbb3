"""docker/compose.minio.yaml without Docker: its own commands, with another ObjectCache in MinIO's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.beds.processes import free_port
from tests.support.compose_steps import steps
from tests.support.requests import OWNER, s3_client
from tests.support.servers import stack, started
from tests.support.tree import repository

pytestmark = pytest.mark.needs_server


@pytest.mark.slow
def test_the_steps_of_the_compose_file_make_a_cache_with_its_bucket(tmp_path: Path) -> None:
    """Twice, as `docker compose up` runs them each time."""
    account = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    upstream_account = {
        "OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID": OWNER[0],
        "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY": OWNER[1],
    }
    with stack("together", tmp_path / "home") as home:
        for _ in range(2):
            chosen = steps(home.url, "127.0.0.1", free_port(), str(tmp_path / "data"))
            with started(*chosen.serve, environment={**account, **upstream_account}) as (url, _):
                made = subprocess.run(
                    [sys.executable, "-c", chosen.make_bucket],
                    env={**os.environ, **account},
                    cwd=repository(),
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                assert made.returncode == 0, made.stderr
                s3_client(url).put_object(Bucket="kv-cache", Key="key", Body=b"data")
            assert s3_client(home.url).get_object(Bucket="kv-cache", Key="key")["Body"].read() == b"data"
