"""The `objectcache` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from adapters.nixl_agent import leave
from objectcache import serve
from objectcache.config import ConfigError, load_config, load_credentials, load_peer_secret


def main() -> None:
    """Entry point of the console script."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit status: 0 done, 1 failed, 2 wrong use."""
    if arguments[:1] == ["bench"]:
        from bench.cli import run as run_bench  # its own parser, and numpy and more that serving does not need

        return run_bench(arguments[1:])
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        status: int = options.command(options)
    except ConfigError as error:
        print(f"objectcache: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"objectcache: {error.filename or ''} {error.strerror or error}".strip(), file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="objectcache", description="S3-compatible object storage that serves LLM KV caches layer by layer."
    )
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="default: warning"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    both = commands.add_parser("serve", help="gateway and storage server together, on an embedded store")
    both.add_argument("--data", type=Path, required=True, metavar="DIR", help="where objects are kept")
    _add_listen(both)
    _add_common(both)
    _add_storage(both)
    both.set_defaults(command=_serve)

    storage = commands.add_parser("storage-server", help="the storage server alone, for gateways elsewhere")
    storage.add_argument("--data", type=Path, required=True, metavar="DIR", help="where objects are kept")
    storage.add_argument(
        "--listen", default=None, metavar="ADDRESS", help="unix:PATH or HOST:PORT; default: unix:DIR/storage.sock"
    )
    storage.add_argument(
        "--peer-secret-file",
        type=Path,
        metavar="FILE",
        help="default: DIR/peer-secret, made once",
    )
    _add_common(storage)
    _add_storage(storage)
    storage.set_defaults(command=_storage_server)

    gateway = commands.add_parser("gateway", help="the S3 gateway alone, over a storage server elsewhere")
    gateway.add_argument("--storage", required=True, metavar="ADDRESS", help="unix:PATH or http://HOST:PORT")
    gateway.add_argument("--peer-secret-file", type=Path, required=True, metavar="FILE", help="the storage server's")
    gateway.add_argument(
        "--credentials-file",
        type=Path,
        default=Path("objectcache-credentials.json"),
        metavar="FILE",
        help="where a generated key pair is kept",
    )
    _add_listen(gateway)
    _add_common(gateway)
    gateway.set_defaults(command=_gateway)

    commands.add_parser("bench", help="measure; each figure comes with what it is a ratio of")
    return parser


def _add_listen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=9000, help="default: 9000; 0 picks a free one")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML; see docs/configuration.md")


def _add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-ucx", action="store_true", help="serve over http only")


def _serve(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    settings = config.storage_settings(options.data, ucx=not options.no_ucx)
    credentials = load_credentials(config, os.environ, options.data / "credentials.json")
    listen = serve.Listen(options.host, options.port)
    serve.run("objectcache", lambda: serve.Together(settings, config.gateway_settings(), credentials, listen))
    return 0


def _storage_server(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    settings = config.storage_settings(options.data, ucx=not options.no_ucx)
    secret = load_peer_secret(options.peer_secret_file or options.data / "peer-secret", create=True)
    listen = _parse_listen(options.listen or f"unix:{options.data / 'storage.sock'}")
    serve.run("objectcache storage-server", lambda: serve.StorageServer(settings, secret, listen))
    return 0


def _gateway(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    secret = load_peer_secret(options.peer_secret_file, create=False)
    credentials = load_credentials(config, os.environ, options.credentials_file)
    listen = serve.Listen(options.host, options.port)
    serve.run(
        "objectcache gateway",
        lambda: serve.GatewayServer(options.storage, secret, config.gateway_settings(), credentials, listen),
    )
    return 0


def _parse_listen(text: str) -> serve.Listen:
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:"))
        path.parent.mkdir(parents=True, exist_ok=True)
        return serve.Listen(socket_path=path)
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--listen {text}: must be unix:PATH or HOST:PORT")
    return serve.Listen(host.strip("[]"), int(port))


if __name__ == "__main__":
    main()
