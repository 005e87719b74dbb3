"""`--cluster`: where the members of a cluster are learned, and `objectcache cluster`."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

from adapters.etcd import Etcd
from adapters.etcd_membership import EtcdMembership
from adapters.membership import FileMembership, Membership
from objectcache.config import ClusterConfig, ConfigError

_ETCD = re.compile(r"(etcds?)://([^/@]+)/([A-Za-z0-9][A-Za-z0-9._/-]{0,200})\Z")
ID_FILE = "cluster-id"


def membership_of(text: str, config: ClusterConfig, data_dir: Path | None = None) -> Membership:
    """`file:PATH`, `etcd://HOST:PORT[,HOST:PORT]/PREFIX`, or `etcds://…` over TLS. A storage server keeps the id of its
    cluster in `data_dir`. Raises ConfigError.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileMembership(Path(rest.removeprefix("//")))
    match = _ETCD.match(text)
    if match is None:
        problem = "must be file:PATH, etcd://HOST:PORT[,HOST:PORT]/PREFIX, or etcds:// for TLS"
        raise ConfigError(f"--cluster {text}: {problem}")
    scheme, hosts, prefix = match.groups()
    tls = _tls(config) if scheme == "etcds" else None
    endpoints = [f"{'http' if tls is None else 'https'}://{host}" for host in hosts.split(",")]
    etcd = Etcd(endpoints, config.account(), tls)
    if data_dir is None:
        return EtcdMembership(etcd, prefix, config.lease_s)
    file = data_dir / ID_FILE
    return EtcdMembership(etcd, prefix, config.lease_s, known_id(file), lambda found: write_id(file, found))


def known_id(file: Path) -> str | None:
    """The id of the cluster that a storage server is a member of; None before its first start."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text().strip() or None
    return None


def write_id(file: Path, cluster_id: str) -> None:
    """Remember the cluster's id, in one step."""
    if known_id(file) == cluster_id:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(".new")
    made.write_text(f"{cluster_id}\n")
    made.replace(file)


def adopt(data_dir: Path) -> int:
    """Forget the cluster that a storage server was a member of, so that its next start takes the one that etcd has."""
    file = data_dir / ID_FILE
    before = known_id(file)
    if before is None:
        print(f"{data_dir} is of no cluster yet")
        return 0
    file.unlink()
    print(f"{data_dir} was of the cluster {before}; the next start takes the one that it finds")
    return 0


def _tls(config: ClusterConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.etcd_ca)
        if config.etcd_certificate is not None:
            context.load_cert_chain(config.etcd_certificate, config.etcd_key)
    except OSError as error:
        raise ConfigError(f"[cluster]: the certificates of etcd cannot be used: {error}") from None
    return context
