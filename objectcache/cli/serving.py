"""`objectcache serve`, `storage-server` and `gateway`: the commands that serve, in one process or in several on several
hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from descriptors.objects import BucketCache
from descriptors.peer_auth import PeerSecrets
from gateway.s3.credentials import Credential
from objectcache.adapters.child_process import end_with_parent
from objectcache.adapters.metrics import shared_folder
from objectcache.cli import serve
from objectcache.cli.arguments import (
    add_common,
    add_listen,
    add_storage,
    cache_argument,
    config_of,
    storage_settings_of,
    tls_of_config,
    with_upstream,
)
from objectcache.cli.cluster import (
    add_cluster,
    add_membership,
    add_peer_tls,
    own_keys,
    peers_of_member,
    require_one_storage,
    storage_of_gateway,
)
from objectcache.cli.config import (
    Config,
    ConfigError,
    check_tenants,
    credentials_from,
    load_config,
    load_credentials,
    load_peer_secrets,
)
from objectcache.cli.config_tables import BucketConfig
from objectcache.cli.listening import Listen, tls_of
from objectcache.cli.rereading import Apply
from objectcache.cli.workers import worker_storage

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_serving(commands: _Commands, logs: argparse.ArgumentParser) -> None:
    """Add the commands that serve: in one process, or in several on several hosts."""
    both = commands.add_parser(
        "serve",
        help="gateway and storage server together, on an embedded store",
        usage="%(prog)s --data DIR [options]",
        description="Start here: keep objects in DIR and serve them to any S3 client. Without an access key in the "
        "environment or the config file, the first start makes one and prints it once.",
        parents=[logs],
    )
    both.add_argument("--data", type=Path, required=True, metavar="DIR", help="where objects are kept")
    both.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that answer S3 requests; default: 1"
    )
    both.add_argument(
        "--cache",
        action="append",
        type=cache_argument,
        default=[],
        metavar="BUCKET[=SIZE]",
        help="make this bucket, and delete its objects ahead of writes that need their room; without a size it has"
        " 80 %% of what the file system offers; may be given more than once",
    )
    add_listen(both)
    add_common(both)
    add_storage(both)
    both.set_defaults(command=_serve)

    storage = commands.add_parser(
        "storage-server",
        help="the storage server alone, for gateways elsewhere",
        usage="%(prog)s --data DIR [options]",
        description="Keep objects in DIR for gateways in other processes or on other hosts. They need what is in "
        "DIR/peer-secret; no S3 client talks to this address.",
        parents=[logs],
    )
    storage.add_argument("--data", type=Path, required=True, metavar="DIR", help="where objects are kept")
    storage.add_argument(
        "--listen",
        default=None,
        metavar="ADDRESS",
        help="unix:PATH or [tcp://]HOST:PORT; default: unix:DIR/storage.sock",
    )
    storage.add_argument(
        "--peer-secret-file",
        type=Path,
        metavar="FILE",
        help="default: DIR/peer-secret, made once",
    )
    storage.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM, with its chain; speaks https then")
    storage.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM")
    storage.add_argument(
        "--peer-ca", type=Path, metavar="FILE", help="PEM: gateways must have a certificate that this one has signed"
    )
    add_membership(storage)
    add_common(storage)
    add_storage(storage)
    storage.set_defaults(command=_storage_server)

    _add_gateway(commands, logs)
    _add_worker(commands, logs)


def _add_gateway(commands: _Commands, logs: argparse.ArgumentParser) -> None:
    """Add the command that runs the S3 side alone."""
    gateway = commands.add_parser(
        "gateway",
        help="the S3 gateway alone, over a storage server elsewhere",
        usage="%(prog)s (--storage ADDRESS | --cluster WHERE) --peer-secret-file FILE [options]",
        description="Answer S3 requests from the objects of a storage server, on this host (unix:DIR/storage.sock) "
        "or on another host, or of a whole cluster. All must be of the same version.",
        parents=[logs],
    )
    gateway.add_argument("--storage", metavar="ADDRESS", help="unix:PATH or http://HOST:PORT")
    add_cluster(gateway)
    add_peer_tls(gateway)
    gateway.add_argument("--peer-secret-file", type=Path, required=True, metavar="FILE", help="the storage servers'")
    gateway.add_argument(
        "--credentials",
        type=Path,
        default=Path("objectcache-credentials.json"),
        metavar="FILE",
        help="where a generated key pair is kept",
    )
    add_listen(gateway)
    add_common(gateway)
    gateway.set_defaults(command=_gateway)


def _add_worker(commands: _Commands, logs: argparse.ArgumentParser) -> None:
    """Add the command that `serve --workers` starts. It is not listed, because it is of no use by hand."""
    worker = commands.add_parser("worker", parents=[logs])
    worker.add_argument("--data", type=Path, required=True)
    worker.add_argument("--socket", type=Path, required=True)
    worker.add_argument("--workers", type=int, required=True)
    worker.add_argument("--upstream")
    worker.add_argument("--peer-secret-file", type=Path, required=True)
    add_listen(worker)
    add_common(worker)
    worker.set_defaults(command=_worker)


def _with_caches(config: Config, caches: Sequence[tuple[str, BucketCache]]) -> Config:
    """Those of the command line are declared as those of the file are, which they replace."""
    names = {name for name, _ in caches}
    said = tuple(BucketConfig(name=name, capacity_bytes=cache.capacity_bytes) for name, cache in caches)
    kept = tuple(each for each in config.buckets if each.name not in names)
    return config.model_copy(update={"buckets": (*kept, *said)})


def _serve(options: argparse.Namespace) -> int:
    config = config_of(options)
    makes = {bucket.name: BucketCache(bucket.capacity_bytes) for bucket in config.buckets} | dict(options.cache)
    if with_upstream(config, options).upstream.endpoint is None:
        config = _with_caches(config, options.cache)
    elif any(cache.capacity_bytes is not None for cache in makes.values()):
        raise ConfigError("in front of another service --disk-bytes bounds the cache of all buckets: give none a size")
    settings = storage_settings_of(config, options)
    credentials_file = options.data / "credentials.json"
    credentials = load_credentials(config, os.environ, credentials_file)
    check_tenants(config, credentials)
    if options.workers < 1:
        raise ConfigError("--workers must be at least 1")
    secret_file = options.data / "peer-secret"
    secrets = load_peer_secrets(secret_file, create=True) if options.workers > 1 else None

    def worker_command(port: int, socket_path: Path) -> list[str]:
        command = [sys.executable, "-P", "-m", "objectcache", "--log-level", options.log_level, "worker"]
        command += ["--log-format", options.log_format]
        command += ["--data", str(options.data), "--socket", str(socket_path), "--peer-secret-file", str(secret_file)]
        command += ["--host", options.host, "--port", str(port), "--workers", str(options.workers)]
        for name, value in (
            ("--config", options.config),
            ("--tls-certificate", options.tls_certificate),
            ("--tls-key", options.tls_key),
            ("--upstream", options.upstream),
        ):
            command += [name, str(value)] if value is not None else []
        return command

    listen = Listen(options.host, options.port, tls=tls_of_config(config))
    gateway = config.gateway_settings()
    with shared_folder() if options.workers > 1 else contextlib.nullcontext():
        serve.run(
            "objectcache",
            lambda: serve.Together(
                settings,
                gateway,
                credentials=credentials,
                listen=listen,
                worker_count=options.workers,
                worker_command=worker_command,
                secrets=secrets,
                makes=makes,
            ),
            rereads=_rereads_scheduler(options) | _rereads_credentials(options, credentials_file),
            keys_from=credentials_from(config, os.environ, credentials_file),
        )
    return 0


def _worker(options: argparse.Namespace) -> int:
    end_with_parent()  # else it would keep the port from a server that is started in place of a killed one
    config = config_of(options)
    secrets = load_peer_secrets(options.peer_secret_file, create=False)
    credentials = load_credentials(config, os.environ, options.data / "credentials.json")
    listen = Listen(options.host, options.port, tls=tls_of_config(config), shares_port=True)
    settings = with_upstream(config, options).storage_settings(options.data)
    gateway = config.gateway_settings().share_of(options.workers)
    serve.run(
        "objectcache worker",
        lambda: serve.GatewayServer(
            worker_storage(f"unix:{options.socket}", secrets, settings), gateway, credentials, listen
        ),
        until_stdin_ends=True,
        rereads=_rereads_credentials(options, options.data / "credentials.json"),
    )
    return 0


def _rereads_scheduler(options: argparse.Namespace) -> dict[str, serve.Reread]:
    read = serve.reconfigured(lambda: load_config(options.config).scheduler_settings())
    return {"the scheduler's settings": read}


def _rereads_credentials(options: argparse.Namespace, file: Path) -> dict[str, serve.Reread]:
    def read() -> list[Credential]:
        config = load_config(options.config)
        if not config.credentials and not os.environ.get("AWS_ACCESS_KEY_ID") and not file.exists():
            raise ConfigError(f"{file} is gone")  # a new pair would lock everybody out
        return load_credentials(config, os.environ, file)

    return {"credentials": serve.recredited(read)}


def _rereads_secrets(secrets: PeerSecrets, file: Path) -> dict[str, serve.Reread]:
    def reread() -> Apply[serve.Server]:
        fresh = load_peer_secrets(file, create=False)
        return lambda _: secrets.become(fresh)

    return {"the peers' secrets": reread}


def _storage_server(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    settings = storage_settings_of(config, options)
    secret_file = options.peer_secret_file or options.data / "peer-secret"
    secrets = load_peer_secrets(secret_file, create=True)
    listen = _parse_listen(options.listen or f"unix:{options.data / 'storage.sock'}")
    listen = replace(listen, tls=tls_of(options.tls_certificate, options.tls_key, options.peer_ca))
    own = own_keys(options, config, settings)
    peers = peers_of_member(options, own, secrets)
    serve.run(
        "objectcache storage-server",
        lambda: serve.StorageServer(
            settings, secrets, listen=listen, own=own, advertised=options.advertise, peers=peers
        ),
        rereads=_rereads_scheduler(options) | _rereads_secrets(secrets, secret_file),
    )
    return 0


def _gateway(options: argparse.Namespace) -> int:
    config = config_of(options)
    require_one_storage(options)
    secrets = load_peer_secrets(options.peer_secret_file, create=False)
    credentials = load_credentials(config, os.environ, options.credentials)
    listen = Listen(options.host, options.port, tls=tls_of_config(config))
    serve.run(
        "objectcache gateway",
        lambda: serve.GatewayServer(
            storage_of_gateway(options, config, secrets), config.gateway_settings(), credentials, listen
        ),
        rereads=_rereads_secrets(secrets, options.peer_secret_file)
        | _rereads_credentials(options, options.credentials),
    )
    return 0


def _parse_listen(text: str) -> Listen:
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:"))
        path.parent.mkdir(parents=True, exist_ok=True)
        return Listen(socket_path=path)
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--listen {text}: must be unix:PATH or [tcp://]HOST:PORT")
    return Listen(host.strip("[]"), int(port))
