"""A cluster in processes of its own: storage servers before one upstream service, and gateways over all of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from descriptors.cluster import ViewId
from descriptors.peer_auth import PeerSecrets
from gateway.storage_client import RemoteStorage, StaleViewError
from nixl_client.client import Client
from tests.support.networks import Network
from tests.support.processes import ServerProcess
from tests.support.requests import OWNER
from tests.support.servers import CONFIG, READY
from tests.support.tree import repository


@dataclass
class Process:
    """One server of a cluster, started by its arguments, which can be killed, stopped and started again."""

    arguments: list[str]
    environment: dict[str, str]
    prefix: tuple[str, ...] = ()
    """The words before the command."""
    process: ServerProcess | None = None
    url: str = ""
    tree: Path = field(default_factory=repository)
    """The checkout that it runs from."""

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        self.process = ServerProcess(self.arguments, self.environment, self.prefix, self.tree)

    def wait_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert READY in line, f"{self.arguments}: {line!r}, exit {self.process.poll()}"
        self.url = line.strip().partition(READY)[2]

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None


@dataclass
class Cluster:
    """Running servers by name, and what they were started with."""

    directory: Path
    upstream_url: str
    where: str
    """What `--cluster` names."""
    members: dict[str, Process] = field(default_factory=dict)
    gateways: list[Process] = field(default_factory=list)
    number: int = 0
    network: Network | None = None
    """Where its servers are hosts; without one they are processes of this host."""

    @property
    def file(self) -> Path:
        return self.directory / "members.toml"

    @property
    def secret(self) -> Path:
        return self.directory / "peer-secret"

    def write_members(self, names: list[str] | None = None) -> None:
        """A new edition of the members file, with these members or all."""
        self.number += 1
        lines = ['cluster = "kv"', f"number = {self.number}"]
        for name in names or list(self.members):
            lines += ["[[members]]", f'name = "{name}"', f'endpoint = "unix:{self.socket(name)}"']
        self.file.write_text("\n".join(lines) + "\n")

    def socket(self, name: str) -> Path:
        return self.directory / f"{name}.sock"

    def add_member(self, name: str, *options: str) -> None:
        host = None if self.network is None else self.network.host(name)
        listen = f"unix:{self.socket(name)}" if host is None else f"{host.address}:9100"
        arguments = ["storage-server", "--data", str(self.directory / name), "--listen", listen]
        arguments += ["--upstream", self.upstream_url, "--cluster", self.where, "--name", name]
        arguments += ["--peer-secret-file", str(self.secret), "--config", str(self.directory / "config.toml"), *options]
        account = {"OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID": OWNER[0], "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY": OWNER[1]}
        self.members[name] = Process(arguments, account, () if host is None else host.prefix)

    def add_gateway(self) -> Process:
        arguments = ["gateway", "--cluster", self.where, "--peer-secret-file", str(self.secret)]
        arguments += ["--config", str(self.directory / "config.toml")]
        if self.network is None:
            gateway = Process([*arguments, "--port", "0"], {})
        else:
            host = self.network.host(f"gateway{len(self.gateways)}")
            gateway = Process([*arguments, "--host", host.address, "--port", "9000"], {}, host.prefix)
        self.gateways.append(gateway)
        return gateway

    def reread(self) -> None:
        """Have every server read the members again."""
        for process in [*self.members.values(), *self.gateways]:
            if process.process is not None:
                process.send(signal.SIGHUP)

    def client(self, bucket: str, gateway: int = 0, **options: object) -> Client:
        url = self.gateways[gateway].url
        return Client(
            url,
            bucket,
            access_key=OWNER[0],
            secret_key=OWNER[1],
            **{"transport": "http", **options},  # type: ignore[arg-type]
        )

    def metrics(self, name: str) -> str:
        """A member's metrics, as it tells them to gateways."""

        return self._ask_metrics(name, self.number)

    def has_read_members(self, name: str) -> bool:
        """Whether a member has read the last edition of the members: it refuses calls under the one before."""
        try:
            self._ask_metrics(name, self.number - 1)
        except StaleViewError:
            return True
        return False

    def _ask_metrics(self, name: str, view_number: int) -> str:
        async def ask() -> str:
            secrets = PeerSecrets(self.secret.read_bytes().strip())
            storage = RemoteStorage(f"unix:{self.socket(name)}", secrets, lambda: ViewId("kv", view_number))
            await storage.start()
            try:
                return await storage.status.metrics("")
            finally:
                await storage.close()

        return asyncio.run(ask())

    def close(self) -> None:
        for process in [*self.gateways, *self.members.values()]:
            process.kill()


@contextlib.contextmanager
def cluster(
    directory: Path,
    upstream_url: str,
    names: tuple[str, ...] = ("a", "b", "c"),
    gateway_count: int = 2,
    config: str = "",
    where: str | None = None,
    storage_options: tuple[str, ...] = (),
    network: Network | None = None,
) -> Iterator[Cluster]:
    """Storage servers of these names, and gateways, over an upstream service whose account is OWNER. They find each
    other by a members file, or as `where` says; with a `network` by etcd alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.toml").write_text(CONFIG + config)
    made = Cluster(directory, upstream_url, where or f"file:{directory / 'members.toml'}", network=network)
    (directory / "peer-secret").write_text("a secret of gateways and storage servers\n")
    (directory / "peer-secret").chmod(0o600)
    for name in names:
        made.add_member(name, *storage_options)
    made.write_members()
    try:
        processes = [*made.members.values(), *(made.add_gateway() for _ in range(gateway_count))]
        for process in processes:
            process.spawn()
        for process in processes:
            process.wait_ready()
        yield made
    finally:
        made.close()
