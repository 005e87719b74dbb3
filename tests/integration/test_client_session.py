"""What the clients of one process share: connections, and agents."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nixl_client.client import Client
from nixl_client.session.shared import Shared
from nixl_client.transports.http import IDLE_CONNECTIONS_MAX, ConnectionPool, ServerAddress
from tests.support.chunks import LAYOUT, make_chunks
from tests.support.servers import LocalStack
from tests.support.tree import repository

KEYS = {"access_key": "k", "secret_key": "s" * 8}


class CountingServer(ThreadingHTTPServer):
    """Answers every lookup with nothing, and knows on which connections it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Lookups)
        self.connections: list[tuple[str, int]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Lookups(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, CountingServer)
        self.server.connections.append(self.client_address)
        body = b'{"matched": 0}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[CountingServer]:
    with CountingServer() as running:
        yield running
        running.shutdown()


def test_clients_of_the_same_server_and_key_share_connections(server: CountingServer) -> None:
    """An engine's connector has several clients in a process; each connection costs a handshake."""
    with Client(server.url, "a", **KEYS) as first, Client(server.url, "b", **KEYS) as second:
        for client in (first, second, first):
            assert client.lookup(["chunk"]) == 0
    assert len(set(server.connections)) == 1


def test_another_key_has_connections_of_its_own(server: CountingServer) -> None:
    other = {"access_key": "other", "secret_key": "t" * 8}
    with Client(server.url, "a", **KEYS) as first, Client(server.url, "a", **other) as second:
        first.lookup(["chunk"])
        second.lookup(["chunk"])
    assert len(set(server.connections)) == 2


def test_the_last_client_closes_the_connections(server: CountingServer) -> None:
    first, second = (Client(server.url, "a", **KEYS) for _ in range(2))
    first.lookup(["chunk"])
    first.close()
    first.close()
    second.lookup(["chunk"])
    assert len(set(server.connections)) == 1
    second.close()
    with Client(server.url, "a", **KEYS) as third:
        third.lookup(["chunk"])
    assert len(set(server.connections)) == 2


@pytest.mark.slow
def test_idle_connections_are_bounded(server: CountingServer) -> None:
    """Each costs a descriptor here and one at the server."""
    pool = ConnectionPool(ServerAddress.parse(server.url))
    taken = [pool.take(5.0) for _ in range(IDLE_CONNECTIONS_MAX + 3)]
    for connection in taken:
        connection.connect()
    for connection in taken:
        pool.give_back(connection)
    assert sum(connection.sock is not None for connection in taken) == IDLE_CONNECTIONS_MAX
    pool.close()
    assert all(connection.sock is None for connection in taken)


FORKED = """
import os
from nixl_client.client import Client
from tests.integration.test_client_session import KEYS, CountingServer

server = CountingServer()
client = Client(server.url, "a", **KEYS)
client.lookup(["chunk"])
child = os.fork()
if not child:
    inherited = client.lookup(["chunk"])
    with Client(server.url, "a", **KEYS) as own:
        os._exit(inherited + own.lookup(["chunk"]))
_, status = os.waitpid(child, 0)
assert status == 0, status
client.lookup(["chunk"])
assert len(server.connections) == 4
assert server.connections[0] == server.connections[3]
assert server.connections[0] not in server.connections[1:3]
client.close()
"""


@pytest.mark.slow
def test_a_forked_process_uses_connections_of_its_own() -> None:
    """Parent and child would read each other's answers."""
    command = [sys.executable, "-c", FORKED]
    ended = subprocess.run(command, cwd=repository(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_shared_values_are_made_once_and_given_back_by_each_user() -> None:
    shared: Shared[str, list[int]] = Shared()
    first = shared.take("a", list)
    assert shared.take("a", list) is first
    assert shared.take("b", list) is not first
    assert [shared.give_back("a", first), shared.give_back("a", first)] == [False, True]
    assert not shared.give_back("a", first)
    assert shared.take("a", list) is not first


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_clients_of_one_process_share_one_agent_and_release_only_their_own_buffers(
    local: LocalStack, transport: str
) -> None:
    """A connection, a heartbeat and a thread for each client of the same server and key would do the same work."""
    keys, chunks = make_chunks(3, LAYOUT, seed=5)
    table = local.storage.agents.table
    first, second = (local.client("chunks", transport) for _ in range(2))
    first.put_chunks(keys, list(chunks))
    nbytes = LAYOUT.delivery_bytes(3)
    mine, yours, ours = (first.allocate_buffer(nbytes) for _ in range(3))
    for client, buffer in ((first, mine), (second, yours), (first, ours), (second, ours)):
        client.register_buffer(buffer)
    (agent,) = table.agents
    assert len(agent.regions) == 3
    first.release_buffer(ours)
    (agent,) = table.agents
    assert len(agent.regions) == 3
    first.close()
    (agent,) = table.agents
    assert len(agent.regions) == 2
    for buffer in (yours, ours):
        second.fetch(keys, LAYOUT, buffer, delivery="chunk-major").wait(30)
        assert buffer.tobytes() == chunks.tobytes()
    second.close()
    assert len(table) == 0


def test_clients_that_wait_for_the_server_differently_have_agents_of_their_own(local: LocalStack) -> None:
    """One that gives up after a second must not wait for a registration that may take a minute."""
    clients = [local.client("chunks", "shm", timeout_s=timeout_s) for timeout_s in (10.0, 20.0)]
    for client in clients:
        client.register_buffer(client.allocate_buffer(4096))
    assert len(local.storage.agents.table) == 2
    for client in clients:
        client.close()
    assert len(local.storage.agents.table) == 0


def test_a_closed_client_can_be_closed_again(local: LocalStack) -> None:
    """Another client of the process keeps what they shared."""
    keys, chunks = make_chunks(2, LAYOUT, seed=6)
    first, second, third = (local.client("chunks", "shm") for _ in range(3))
    first.put_chunks(keys, list(chunks))
    buffer = second.allocate_buffer(LAYOUT.delivery_bytes(2))
    first.register_buffer(first.allocate_buffer(4096))
    second.register_buffer(buffer)
    third.register_buffer(third.allocate_buffer(4096))
    for _ in range(3):
        first.close()
    second.fetch(keys, LAYOUT, buffer, delivery="chunk-major").wait(30)
    assert buffer.tobytes() == chunks.tobytes()
    third.close()
    second.close()
    with pytest.raises(RuntimeError, match="closed"):
        second.fetch(keys, LAYOUT, buffer)
