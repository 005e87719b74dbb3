"""`--cluster`: where the members of a cluster are learned, and `objectcache cluster`."""

from __future__ import annotations

import argparse
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

from descriptors.cluster import Member
from descriptors.objects import ReadRequest
from descriptors.peer_auth import PeerSecrets
from descriptors.storage_api import SERVER_KEY, ObjectRead
from gateway.cluster.members import Members
from gateway.cluster.storage import ClusterStorage
from gateway.storage_client import RemoteStorage
from objectcache.adapters.etcd import Etcd
from objectcache.adapters.etcd_membership import EtcdMembership
from objectcache.adapters.membership import FileMembership, Membership, MembershipError
from objectcache.adapters.mpi_membership import MpiMembership
from objectcache.cli.config import Config, ConfigError
from objectcache.cli.config_tables import ClusterConfig
from objectcache.cli.remote import remote_options
from objectcache.cli.status import run_cluster_status
from storage_server.agents.rules.agents import RegisteredAgent
from storage_server.home.own_keys import SETTLE_LEASES, SETTLE_S, OwnKeys
from storage_server.settings import StorageSettings, Write

_ETCD = re.compile(r"(etcds?)://([^/@]+)/([A-Za-z0-9][A-Za-z0-9._/-]{0,200})\Z")
ID_FILE = "cluster-id"
MPI = "mpi"
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where the members are learned."""
    parser.add_argument(
        "--cluster",
        metavar="WHERE",
        help="where the members of a cluster are learned: etcd://HOST:PORT[,HOST:PORT]/PREFIX, file:PATH, which SIGHUP"
        " reads again, or mpi: from each other, under one mpiexec or srun; docs/guides/cluster.md",
    )


def add_membership(parser: argparse.ArgumentParser) -> None:
    """Add the options of a storage server that is a member."""
    add_cluster(parser)
    parser.add_argument(
        "--name", metavar="NAME", help="this server's name among the members; default under MPI: its rank"
    )
    parser.add_argument(
        "--advertise", metavar="URL", help="where gateways reach it, for etcd; default: where it listens"
    )
    parser.add_argument(
        "--weight",
        type=float,
        default=1.0,
        metavar="W",
        help="how many keys it keeps, beside the others' weights; default: 1",
    )


def add_adopt(commands: Commands, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add `objectcache cluster` and its own commands."""
    cluster = commands.add_parser("cluster", help="show a cluster, or repair the membership of a storage server")
    actions = cluster.add_subparsers(required=True, metavar="COMMAND")
    status = actions.add_parser(
        "status",
        help="say who is in the cluster, and who answers",
        usage="%(prog)s [URL] [options]",
        description="Ask a gateway for the members of its cluster: where each is, which part of the keys it keeps, and "
        "how it does. The key must be one of all buckets.",
        parents=parents,
    )
    status.add_argument("url", nargs="?", metavar="URL", help="of a gateway; the same as --endpoint")
    remote_options(status)
    status.set_defaults(command=run_cluster_status)
    repair = actions.add_parser(
        "adopt",
        help="have a storage server join the cluster that is there now",
        usage="%(prog)s --data DIR",
        description="After etcd was rebuilt a storage server refuses to start, because its cluster is not there any "
        "more. This has its next start take the cluster that it finds.",
        parents=parents,
    )
    repair.add_argument("--data", type=Path, required=True, metavar="DIR", help="of the storage server")
    repair.set_defaults(command=lambda options: adopt(options.data))


class MemberPeers:
    """Implements storage_server.service.storage.Peers over the calls that gateways make, too."""

    def __init__(self, membership: Membership, secrets: PeerSecrets, tls: ssl.SSLContext | None) -> None:
        self._membership = membership
        self._secrets = secrets
        self._tls = tls
        self._storages: dict[str, RemoteStorage] = {}

    @asynccontextmanager
    async def open_copy(self, member: Member, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        """A read of what the member has in its cache."""
        storage = await self._storage(member)
        async with storage.objects.open_object(SERVER_KEY, request) as read:
            yield read

    async def downlink_share(
        self, member: Member, agent: RegisteredAgent, writer: str, left_bytes: int, whole_bytes: int
    ) -> float:
        """The share that the member gives, as the agent's keeper."""
        storage = await self._storage(member)
        return await storage.agents.downlink_share(agent.access_key, agent.agent_id, writer, left_bytes, whole_bytes)

    async def _storage(self, member: Member) -> RemoteStorage:
        storage = self._storages.get(member.endpoint)
        if storage is None:
            storage = RemoteStorage(member.endpoint, self._secrets, lambda: self._membership.view.id, self._tls)
            there = {each.endpoint for each in self._membership.view.members}
            left = [self._storages.pop(endpoint) for endpoint in set(self._storages) - there]
            self._storages[member.endpoint] = storage
            await storage.start()
            for each in left:  # members move and go for ever
                await each.close()
        return storage

    async def close(self) -> None:
        """Close every connection."""
        for storage in self._storages.values():
            await storage.close()


def peers_of_member(options: argparse.Namespace, own: OwnKeys | None, secrets: PeerSecrets) -> MemberPeers | None:
    """The other members, whom this server shows its own certificate where they speak TLS. Raises ConfigError."""
    if own is None:
        return None
    tls = None
    if options.peer_ca is not None:
        tls = peer_tls(options.peer_ca, options.tls_certificate, options.tls_key)
    return MemberPeers(own.membership, secrets, tls)


def own_keys(options: argparse.Namespace, config: Config, settings: StorageSettings) -> OwnKeys | None:
    """A storage server's part in a cluster; None where it is in none. Raises ConfigError."""
    if options.cluster is None:
        if options.name is not None:
            raise ConfigError("--name goes with --cluster")
        return None
    if options.name is None and options.cluster != MPI:
        raise ConfigError(f"--cluster needs --name, except --cluster {MPI}")
    if settings.upstream is None:
        raise ConfigError("--cluster needs --upstream: the home of objects that all members stand in front of")
    if settings.upstream.write is Write.BACK:
        raise ConfigError('[upstream]: write = "back" does not go with --cluster: others would not know what is dirty')
    membership = membership_of(options.cluster, config, options.data)
    name = options.name or (f"rank-{membership.rank}" if isinstance(membership, MpiMembership) else "")
    settle_s = max(SETTLE_S, SETTLE_LEASES * config.internals.cluster.lease_s)
    return OwnKeys(membership, name, options.weight, settle_s)


def require_one_storage(options: argparse.Namespace) -> None:
    """Raises ConfigError for a gateway over nothing, or over two things."""
    if (options.storage is None) == (options.cluster is None):
        raise ConfigError("a gateway needs --storage or --cluster, and not both")


def storage_of_gateway(
    options: argparse.Namespace, config: Config, secrets: PeerSecrets
) -> RemoteStorage | ClusterStorage:
    """One storage server, or a cluster. Raises ConfigError."""
    tls = None
    if options.peer_ca is not None:
        tls = peer_tls(options.peer_ca, options.peer_certificate)
    elif options.peer_certificate is not None:
        raise ConfigError("--peer-certificate needs --peer-ca")
    if options.cluster is None:
        return RemoteStorage(options.storage, secrets, tls=tls)
    membership = membership_of(options.cluster, config)
    return ClusterStorage(
        Members(membership, lambda endpoint: RemoteStorage(endpoint, secrets, lambda: membership.view.id, tls))
    )


def peer_tls(ca: Path, certificate: Path | None, key: Path | None = None) -> ssl.SSLContext:
    """The context in which storage servers are spoken to over https: it trusts `ca` alone, so names in certificates
    need not fit addresses; the certificate, whose key is in the same file or in `key`, is shown to servers that ask
    for one. Raises ConfigError.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(f"--peer-ca and --peer-certificate: {error}") from None
    return context


def add_peer_tls(parser: argparse.ArgumentParser) -> None:
    """Add the options of a gateway whose storage servers speak TLS."""
    parser.add_argument(
        "--peer-ca", type=Path, metavar="FILE", help="PEM: what https storage servers are trusted by, and nothing else"
    )
    parser.add_argument(
        "--peer-certificate", type=Path, metavar="FILE", help="PEM with its key, for servers that ask for one"
    )


def membership_of(text: str, config: Config, data_dir: Path | None = None) -> Membership:
    """`file:PATH`, `etcd://HOST:PORT[,HOST:PORT]/PREFIX`, or `etcds://…` over TLS, or `mpi`. A storage server keeps the
    id of its cluster in `data_dir`. Raises ConfigError.
    """
    if text == MPI:
        try:
            return MpiMembership()
        except MembershipError as error:
            raise ConfigError(f"--cluster {MPI}: {error}") from None
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileMembership(Path(rest.removeprefix("//")))
    etcd, prefix = etcd_of("--cluster", text, config.cluster, f"{MPI}, file:PATH, ")
    lease_s = config.internals.cluster.lease_s
    if data_dir is None:
        return EtcdMembership(etcd, prefix, lease_s)
    file = data_dir / ID_FILE
    return EtcdMembership(etcd, prefix, lease_s, known_id(file), lambda found: write_id(file, found))


def etcd_of(option: str, text: str, config: ClusterConfig, others: str = "") -> tuple[Etcd, str]:
    """etcd and the prefix that an option names. `others` are other forms that the option may have. Raises
    ConfigError.
    """
    match = _ETCD.match(text)
    if match is None:
        problem = f"must be {others}etcd://HOST:PORT[,HOST:PORT]/PREFIX, or etcds:// for TLS"
        raise ConfigError(f"{option} {text}: {problem}")
    scheme, hosts, prefix = match.groups()
    tls = _tls(config) if scheme == "etcds" else None
    endpoints = [f"{'http' if tls is None else 'https'}://{host}" for host in hosts.split(",")]
    return Etcd(endpoints, config.account(), tls), prefix


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
