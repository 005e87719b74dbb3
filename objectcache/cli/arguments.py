"""Options that several commands share, and the settings that they and the configuration file make together."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from descriptors.errors import CallerError
from descriptors.objects import BucketCache
from descriptors.units import parse_bytes
from gateway.s3.request import check_bucket_name
from objectcache.adapters.interfaces import LOOPBACK
from objectcache.cli.config import Config, load_config
from objectcache.cli.listening import Tls, tls_of
from storage_server.settings import StorageSettings

PORT_MAX = 65535


def add_listen(parser: argparse.ArgumentParser) -> None:
    """Add where a server listens."""
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    parser.add_argument("--port", type=_port, default=9000, help="default: 9000; 0 picks a free one")
    parser.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM, with its chain; speaks https then")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML; see docs/reference/configuration.md")


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Add what a storage server keeps, and where."""
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


def cache_argument(text: str) -> tuple[str, BucketCache]:
    """BUCKET or BUCKET=SIZE. Raises ArgumentTypeError."""
    name, is_sized, size = text.partition("=")
    try:
        check_bucket_name(name)
        return name, BucketCache.of_text(size) if is_sized else BucketCache()
    except CallerError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def config_of(options: argparse.Namespace) -> Config:
    """The config file's settings, overridden by the command line's."""
    config = load_config(options.config)
    chosen = {
        "tls_certificate": options.tls_certificate,
        "tls_key": options.tls_key,
    }
    said = {name: value for name, value in chosen.items() if value is not None}
    return config.model_copy(update={"gateway": config.gateway.model_copy(update=said)})


def storage_settings_of(config: Config, options: argparse.Namespace) -> StorageSettings:
    """The storage server's settings, those of the command line first."""
    chosen = {
        "dram_bytes": options.dram_bytes,
        "disk_bytes": options.disk_bytes,
        "ucx": options.ucx,
    }
    said = {name: value for name, value in chosen.items() if value is not None}
    config = config.model_copy(update={"storage": config.storage.model_copy(update=said)})
    settings = with_upstream(config, options).storage_settings(options.data)
    return replace(settings, adopt_index=options.adopt_index)


def with_upstream(config: Config, options: argparse.Namespace) -> Config:
    """The settings with the service upstream that the command line names."""
    if options.upstream is None:
        return config
    return config.model_copy(update={"upstream": config.upstream.model_copy(update={"endpoint": options.upstream})})


def tls_of_config(config: Config) -> Tls | None:
    """The gateway's certificate; None without one."""
    return tls_of(config.gateway.tls_certificate, config.gateway.tls_key)
