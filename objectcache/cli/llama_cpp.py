"""`objectcache llama-cpp`: a proxy in front of llama.cpp's server that keeps its slots' KV in a bucket."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from objectcache.cli import serve
from objectcache.cli.config_values import ConfigError
from objectcache.cli.listening import Listen, listening
from objectcache.cli.remote import endpoint_of, keys_of, region, server_options

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_llama_cpp(commands: Commands, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "llama-cpp",
        help="stand in front of llama.cpp's server, and keep the KV of prompts in a bucket",
        usage="%(prog)s --engine URL --data DIR [options]",
        description="Start `llama-server --slot-save-path DIR`, then this on the same host, and point clients at this"
        " address. Before a prompt runs, its slot gets the KV that the bucket has of it; afterwards the rest is kept.",
        parents=parents,
    )
    command.add_argument(
        "--engine", required=True, metavar="URL", help="llama-server, for example http://127.0.0.1:8080"
    )
    command.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="its --slot-save-path, best in memory: /dev/shm/slots"
    )
    command.add_argument("--bucket", default="kv-cache", metavar="NAME", help="default: kv-cache; made as a cache")
    command.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    command.add_argument("--port", type=int, default=8081, help="default: 8081; 0 picks a free one")
    server_options(command)
    command.set_defaults(command=run_llama_cpp)


def run_llama_cpp(options: argparse.Namespace) -> int:
    """Run until a signal ends it. Raises ConfigError."""
    from nixl_client.client import Client
    from nixl_client.connectors.llama_cpp.sidecar import LlamaSidecar

    parts = urlsplit(options.engine)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--engine {options.engine}: write http://HOST:PORT")
    if not options.data.is_dir():
        raise ConfigError(f"--data {options.data}: there is no such folder; it is llama-server's --slot-save-path")
    access_key, secret_key = keys_of(options.credentials)
    listen = Listen(options.host, options.port)
    with Client(
        endpoint_of(options.endpoint), options.bucket, access_key=access_key, secret_key=secret_key, region=region()
    ) as client:
        serve.run(
            "objectcache llama-cpp",
            lambda: LlamaSidecar(options.engine, options.data, client, lambda server: listening(server, listen)),
        )
    return 0
