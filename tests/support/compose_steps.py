"""The steps of docker/compose.minio.yaml, for checks that run them without Docker and with another service in MinIO's
place.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from tests.support.tree import repository

COMPOSE = repository() / "docker" / "compose.minio.yaml"
UPSTREAM, SERVER = "http://minio:9000", "http://objectcache:9000"


@dataclass(frozen=True, slots=True)
class Steps:
    """Commands inside the image: the server's, behind `objectcache`, and the program that makes the bucket."""

    serve: list[str]
    make_bucket: str


def steps(upstream: str, host: str, port: int, data: str) -> Steps:
    """The steps with these addresses in place of the compose network's."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    replaced = {
        f"--upstream={UPSTREAM}": f"--upstream={upstream}",
        "--host=0.0.0.0": f"--host={host}",
        "--port=9000": f"--port={port}",
        "--data=/var/lib/objectcache/data": f"--data={data}",
    }
    words = services["objectcache"]["command"]
    if not set(replaced) <= set(words):
        raise ValueError(f"{COMPOSE.name} has other options than {sorted(replaced)}")
    (program,) = services["make-bucket"]["command"]
    if SERVER not in program:
        raise ValueError(f"{COMPOSE.name} makes its bucket elsewhere than at {SERVER}")
    return Steps([replaced.get(word, word) for word in words], program.replace(SERVER, f"http://{host}:{port}"))
