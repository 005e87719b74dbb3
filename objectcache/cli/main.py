"""The `objectcache` command."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from descriptors.cluster import ClusterError
from descriptors.errors import CallerError, ObjectCacheError
from descriptors.objects import BucketCache
from descriptors.peer_auth import PeerSecrets
from descriptors.units import parse_bytes
from descriptors.version import __version__
from gateway.s3.credentials import Credential
from gateway.s3.request import check_bucket_name
from objectcache.adapters.child_process import end_with_parent
from objectcache.adapters.interfaces import LOOPBACK, UnknownInterfaceError
from objectcache.adapters.membership import MembershipError
from objectcache.adapters.metrics import shared_folder
from objectcache.adapters.nixl_agent import NixlFailure, leave
from objectcache.cli import serve
from objectcache.cli.calibrate import add_calibrate
from objectcache.cli.cluster import (
    add_adopt,
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
from objectcache.cli.config_reference import reference
from objectcache.cli.config_tables import BucketConfig
from objectcache.cli.config_values import NoServerError
from objectcache.cli.demo import add_demo
from objectcache.cli.llama_cpp import add_llama_cpp
from objectcache.cli.log_format import FORMATS, configure_log
from objectcache.cli.lookup import add_lookup
from objectcache.cli.orchestrate import add_orchestrator
from objectcache.cli.remote import printable
from objectcache.cli.rereading import Apply
from objectcache.cli.status import add_status
from objectcache.cli.stored import add_stored
from objectcache.cli.workers import worker_storage
from storage_server.home.claim import WrongDirectoryError
from storage_server.home.directory.membership import WrongHomeError
from storage_server.kernel.index.identity import IndexMismatchError
from storage_server.kernel.index.migrations import SchemaError
from storage_server.settings import StorageSettings

PORT_MAX = 65535
REFUSALS = (
    ClusterError, IndexMismatchError, MembershipError, SchemaError, WrongDirectoryError, WrongHomeError
)  # fmt: skip
"""The errors of a start that say what to do."""
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main() -> None:
    """Entry point of the console script."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit status: 0 done, 1 failed, 2 wrong use."""
    if arguments[:1] == ["bench"]:
        return _run_bench(arguments[1:])
    options = make_parser().parse_args(arguments)
    configure_log(options.log_level, options.log_format)
    try:
        status: int = options.command(options)
    except ConfigError as error:
        print(f"objectcache: {error}", file=sys.stderr)
        return 2
    except NoServerError as error:
        print(f"objectcache: {printable(str(error))}", file=sys.stderr)
        return 1
    except (NixlFailure, UnknownInterfaceError) as error:
        print(f"objectcache: the ucx transport cannot be offered: {error}", file=sys.stderr)
        return 1
    except REFUSALS as error:
        print(f"objectcache: {error}", file=sys.stderr)
        return 1
    except ObjectCacheError as error:
        print(f"objectcache: the server cannot start: {error.message}", file=sys.stderr)
        return 1
    except sqlite3.Error as error:
        print(f"objectcache: the index cannot be opened: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        said = ": ".join(filter(None, (str(error.filename or ""), error.strerror or str(error))))
        print(f"objectcache: {said}", file=sys.stderr)
        return 1
    return status


def _run_bench(arguments: Sequence[str]) -> int:
    """Benchmarks are no part of an installation: the package `bench` is looked for beside this one, in a checkout."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "bench" / "cli.py").is_file():
        print("objectcache: benchmarks run from a checkout; this installation has none", file=sys.stderr)
        return 2
    if str(checkout) not in sys.path:  # an editable installation knows the packages of the product only
        sys.path.insert(0, str(checkout))
    status: int = importlib.import_module("bench.cli").run(arguments)
    return status


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="objectcache", description="S3-compatible object storage that serves LLM KV caches layer by layer."
    )
    parser.add_argument("--version", action="version", version=f"objectcache {__version__}")
    levels = ("debug", "info", "warning", "error")
    logs = argparse.ArgumentParser(add_help=False)
    for each, default in ((parser, ("warning", "text")), (logs, (argparse.SUPPRESS, argparse.SUPPRESS))):
        each.add_argument("--log-level", default=default[0], choices=levels, help="default: warning")
        each.add_argument("--log-format", default=default[1], choices=FORMATS, help="default: text")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _add_serving(commands, logs)
    add_demo(commands, [logs])
    add_orchestrator(commands, [logs])
    add_llama_cpp(commands, [logs])
    add_status(commands, [logs])
    add_lookup(commands, [logs])
    add_stored(commands, [logs])
    _add_care(commands, logs)
    add_calibrate(commands, [logs])
    settings = commands.add_parser(
        "config",
        help="print a config file with all settings",
        usage="%(prog)s > objectcache.toml",
        description="Print every setting that a config file may have, with an example and what it means. All are "
        "comments: uncomment what you want to set.",
    )
    settings.set_defaults(command=_print_settings)
    completion = commands.add_parser(
        "completion",
        help="print what makes a shell complete this command",
        usage="%(prog)s SHELL",
        description="Print a script for the shell: `objectcache completion bash > "
        "~/.local/share/bash-completion/completions/objectcache`, or `source <(objectcache completion zsh)`.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh")
    completion.set_defaults(command=_completion)
    commands.add_parser("bench", help="measure; each figure comes with what it is a ratio of")
    return parser


def _add_serving(commands: _Commands, logs: argparse.ArgumentParser) -> None:
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
        type=_cache,
        default=[],
        metavar="BUCKET[=SIZE]",
        help="make this bucket, and delete its objects ahead of writes that need their room; without a size it has"
        " 80 %% of what the file system offers; may be given more than once",
    )
    _add_listen(both)
    _add_common(both)
    _add_storage(both)
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
    _add_common(storage)
    _add_storage(storage)
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
    _add_listen(gateway)
    _add_common(gateway)
    gateway.set_defaults(command=_gateway)


def _add_worker(commands: _Commands, logs: argparse.ArgumentParser) -> None:
    """Add the command that `serve --workers` starts. It is not listed, because it is of no use by hand."""
    worker = commands.add_parser("worker", parents=[logs])
    worker.add_argument("--data", type=Path, required=True)
    worker.add_argument("--socket", type=Path, required=True)
    worker.add_argument("--workers", type=int, required=True)
    worker.add_argument("--upstream")
    worker.add_argument("--peer-secret-file", type=Path, required=True)
    _add_listen(worker)
    _add_common(worker)
    worker.set_defaults(command=_worker)


def _add_care(commands: _Commands, logs: argparse.ArgumentParser) -> None:
    """Add the commands that check and clean a store."""
    scrub = commands.add_parser(
        "scrub",
        help="read everything stored and report damaged bytes",
        usage="%(prog)s --data DIR [options]",
        description="Check a store, served or not: every block is read and compared with its checksum, and nothing is "
        "changed. The exit status is 1 where something is damaged.",
        parents=[logs],
    )
    scrub.add_argument("--data", type=Path, required=True, metavar="DIR", help="a store, served or not")
    scrub.add_argument("--json", type=Path, metavar="FILE", help="write the report here as JSON; - is standard output")
    scrub.set_defaults(command=_scrub)

    doctor = commands.add_parser(
        "doctor",
        help="say what this host and an upstream service offer, and what to change",
        usage="%(prog)s [options]",
        description="Look at this host, at the file system of DIR, at the S3 service upstream, and at a server as its "
        "clients find it. With --bucket objects are put there and deleted again; of a server, a bucket that is missing "
        "is made as a cache. The exit status is 1 where something should be changed.",
        parents=[logs],
    )
    doctor.add_argument("--data", type=Path, metavar="DIR", help="the directory of a server, there or not yet")
    doctor.add_argument("--endpoint", metavar="URL", help="a server, to be tried as a client of this host finds it")
    doctor.add_argument(
        "--credentials", type=Path, metavar="FILE", help="the access key for it; else $AWS_ACCESS_KEY_ID"
    )
    doctor.add_argument("--upstream", metavar="URL", help="the service; its account is found as `serve` finds it")
    doctor.add_argument(
        "--bucket", metavar="NAME", help="a bucket of the server or service, to measure and try it with"
    )
    doctor.add_argument("--config", type=Path, metavar="FILE", help="TOML; docs/reference/configuration.md")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the findings here; - is standard output")
    doctor.set_defaults(command=_doctor)

    add_adopt(commands, [logs])
    compact = commands.add_parser(
        "compact",
        help="rewrite sparse segments of a store that is not being served",
        usage="%(prog)s --data DIR [options]",
        description="Give back the space that deleted objects left in segments which are mostly empty. A server does "
        "so by itself in the background; this is for a store at rest.",
        parents=[logs],
    )
    compact.add_argument("--data", type=Path, required=True, metavar="DIR", help="a store, not served")
    compact.add_argument("--json", type=Path, metavar="FILE", help="write what was done here; - is standard output")
    _add_common(compact)
    compact.set_defaults(command=_compact)


def _add_listen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    parser.add_argument("--port", type=_port, default=9000, help="default: 9000; 0 picks a free one")
    parser.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM, with its chain; speaks https then")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML; see docs/reference/configuration.md")


def _add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--upstream",
        metavar="URL",
        help="stand in front of this S3 service: objects are kept there, and DIR is a cache; its account comes from "
        "[upstream] of the config file or from OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID and ..._SECRET_ACCESS_KEY. "
        "file:///PATH: a directory on a shared file system, which any number of servers use together",
    )
    parser.add_argument(
        "--adopt-index",
        action="store_true",
        help="go on with an index that is older than the data files, or empty; files it does not know are set aside",
    )
    parser.add_argument(
        "--ucx",
        nargs="?",
        const=LOOPBACK,
        type=lambda text: tuple(text.split(",")),
        metavar="IF[,IF]",
        help="offer the ucx transport on these network interfaces; loopback where none is named. Anyone who reaches"
        " them can read and change what ucx clients are sent: docs/guides/security.md",
    )
    parser.add_argument(
        "--dram-bytes",
        type=_size,
        metavar="SIZE",
        help="memory for chunks that are asked for repeatedly, for example 32GB; 0: none",
    )
    parser.add_argument(
        "--disk-bytes",
        type=_size,
        metavar="SIZE",
        help="the most that all files in DIR may take, for example 200e9 or 200GB",
    )


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: from 0 to {PORT_MAX}")
    return int(text)


def _cache(text: str) -> tuple[str, BucketCache]:
    name, is_sized, size = text.partition("=")
    try:
        check_bucket_name(name)
        return name, BucketCache.of_text(size) if is_sized else BucketCache()
    except CallerError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _with_caches(config: Config, caches: Sequence[tuple[str, BucketCache]]) -> Config:
    """Those of the command line are declared as those of the file are, which they replace."""
    names = {name for name, _ in caches}
    said = tuple(BucketConfig(name=name, capacity_bytes=cache.capacity_bytes) for name, cache in caches)
    kept = tuple(each for each in config.buckets if each.name not in names)
    return config.model_copy(update={"buckets": (*kept, *said)})


def _serve(options: argparse.Namespace) -> int:
    config = _config(options)
    makes = {bucket.name: BucketCache(bucket.capacity_bytes) for bucket in config.buckets} | dict(options.cache)
    if _with_upstream(config, options).upstream.endpoint is None:
        config = _with_caches(config, options.cache)
    elif any(cache.capacity_bytes is not None for cache in makes.values()):
        raise ConfigError("in front of another service --disk-bytes bounds the cache of all buckets: give none a size")
    settings = _storage_settings(config, options)
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

    listen = serve.Listen(options.host, options.port, tls=_tls(config))
    gateway = config.gateway_settings()
    with shared_folder() if options.workers > 1 else contextlib.nullcontext():
        serve.run(
            "objectcache",
            lambda: serve.Together(
                settings, gateway, credentials, listen, options.workers, worker_command, secrets, makes=makes
            ),
            rereads=_rereads_scheduler(options) | _rereads_credentials(options, credentials_file),
            keys_from=credentials_from(config, os.environ, credentials_file),
        )
    return 0


def _worker(options: argparse.Namespace) -> int:
    end_with_parent()  # else it would keep the port from a server that is started in place of a killed one
    config = _config(options)
    secrets = load_peer_secrets(options.peer_secret_file, create=False)
    credentials = load_credentials(config, os.environ, options.data / "credentials.json")
    listen = serve.Listen(options.host, options.port, tls=_tls(config), shares_port=True)
    settings = _with_upstream(config, options).storage_settings(options.data)
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


def _print_settings(options: argparse.Namespace) -> int:
    print(reference(Config, as_comments=True), end="")
    return 0


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(make_parser(), options.shell))
    return 0


def _scrub(options: argparse.Namespace) -> int:
    from objectcache.cli.scrub import run as run_scrub

    return run_scrub(options.data, options.json)


def _doctor(options: argparse.Namespace) -> int:
    from objectcache.cli.doctor import run as run_doctor

    if options.endpoint is not None and options.upstream is not None:
        raise ConfigError("--endpoint and --upstream are looked at by one call each")
    config = _with_upstream(load_config(options.config), options)
    upstream = config.upstream.settings(os.environ)
    tried = None
    if options.endpoint is not None:
        from objectcache.cli.doctor_client import client_findings

        tried = client_findings(options)
    return run_doctor(options.data, upstream, options.bucket, options.json, tried)


def _compact(options: argparse.Namespace) -> int:
    from objectcache.cli.compact import run as run_compact

    return run_compact(load_config(options.config).storage_settings(options.data), options.json)


def _config(options: argparse.Namespace) -> Config:
    """The config file's settings, overridden by the command line's."""
    config = load_config(options.config)
    chosen = {
        "tls_certificate": options.tls_certificate,
        "tls_key": options.tls_key,
    }
    said = {name: value for name, value in chosen.items() if value is not None}
    return config.model_copy(update={"gateway": config.gateway.model_copy(update=said)})


def _storage_settings(config: Config, options: argparse.Namespace) -> StorageSettings:
    chosen = {
        "dram_bytes": options.dram_bytes,
        "disk_bytes": options.disk_bytes,
        "ucx": options.ucx,
    }
    said = {name: value for name, value in chosen.items() if value is not None}
    config = config.model_copy(update={"storage": config.storage.model_copy(update=said)})
    settings = _with_upstream(config, options).storage_settings(options.data)
    return replace(settings, adopt_index=options.adopt_index)


def _with_upstream(config: Config, options: argparse.Namespace) -> Config:
    if options.upstream is None:
        return config
    return config.model_copy(update={"upstream": config.upstream.model_copy(update={"endpoint": options.upstream})})


def _tls(config: Config) -> serve.Tls | None:
    return serve.tls_of(config.gateway.tls_certificate, config.gateway.tls_key)


def _storage_server(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    settings = _storage_settings(config, options)
    secret_file = options.peer_secret_file or options.data / "peer-secret"
    secrets = load_peer_secrets(secret_file, create=True)
    listen = _parse_listen(options.listen or f"unix:{options.data / 'storage.sock'}")
    listen = replace(listen, tls=serve.tls_of(options.tls_certificate, options.tls_key, options.peer_ca))
    own = own_keys(options, config, settings)
    peers = peers_of_member(options, own, secrets)
    serve.run(
        "objectcache storage-server",
        lambda: serve.StorageServer(settings, secrets, listen, own, options.advertise, peers),
        rereads=_rereads_scheduler(options) | _rereads_secrets(secrets, secret_file),
    )
    return 0


def _gateway(options: argparse.Namespace) -> int:
    config = _config(options)
    require_one_storage(options)
    secrets = load_peer_secrets(options.peer_secret_file, create=False)
    credentials = load_credentials(config, os.environ, options.credentials)
    listen = serve.Listen(options.host, options.port, tls=_tls(config))
    serve.run(
        "objectcache gateway",
        lambda: serve.GatewayServer(
            storage_of_gateway(options, config, secrets), config.gateway_settings(), credentials, listen
        ),
        rereads=_rereads_secrets(secrets, options.peer_secret_file)
        | _rereads_credentials(options, options.credentials),
    )
    return 0


def _parse_listen(text: str) -> serve.Listen:
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:"))
        path.parent.mkdir(parents=True, exist_ok=True)
        return serve.Listen(socket_path=path)
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--listen {text}: must be unix:PATH or [tcp://]HOST:PORT")
    return serve.Listen(host.strip("[]"), int(port))


if __name__ == "__main__":
    main()
