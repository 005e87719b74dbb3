"""Servers the clients are pointed at."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from botocore.config import Config

from tests.clients.drivers.contract import Target
from tests.support.requests import OWNER
from tests.support.servers import CONFIG, stack, started


@contextmanager
def plain_server(folder: Path) -> Iterator[str]:
    """The endpoint of `objectcache serve` over http."""
    with stack("together", folder) as running:
        yield running.url


@contextmanager
def upstream_server(folder: Path) -> Iterator[str]:
    """The endpoint of `objectcache serve --upstream`, in front of another `objectcache serve`."""
    front = folder / "front"
    front.mkdir()
    config = front / "config.toml"
    config.write_text(CONFIG)
    keys = {"OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID": OWNER[0], "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY": OWNER[1]}
    with stack("together", folder / "home") as home:
        options = ("--data", str(front / "data"), "--port", "0", "--config", str(config), "--upstream", home.url)
        with started("serve", *options, environment=keys) as (url, _):
            yield url


@contextmanager
def tls_server(folder: Path) -> Iterator[tuple[str, Path]]:
    """The endpoint of `objectcache serve` over https, and the authority to trust."""
    certificate, key = make_certificate(folder)
    config = folder / "config.toml"
    config.write_text(CONFIG)
    options = ("--config", str(config), "--tls-certificate", str(certificate), "--tls-key", str(key))
    with started("serve", "--data", str(folder / "data"), "--port", "0", *options) as (url, _):
        yield url, certificate


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for the loopback address, signed with its own key: certificate and key files."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:*.localhost"
    request = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run([*request, "-addext", names, *files], check=True, capture_output=True, timeout=60)
    return certificate, key


def make_bucket(target: Target) -> None:
    """Create the bucket a client works in."""
    s3 = boto3.client(
        "s3",
        endpoint_url=target.endpoint,
        region_name=target.region,
        aws_access_key_id=target.access_key,
        aws_secret_access_key=target.secret_key,
        verify=target.ca_file or True,
        config=Config(s3={"addressing_style": "path"}),
    )
    s3.create_bucket(Bucket=target.bucket)
    s3.close()
