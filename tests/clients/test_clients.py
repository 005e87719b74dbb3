"""Real clients, each as its users run it, against a running server. What each does is in tests/clients/drivers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.catalogue import CLIENTS, OVER_TLS, Client
from tests.clients.drivers.contract import Result, Target
from tests.clients.install import install
from tests.clients.runner import LIMIT_S, run
from tests.clients.server import make_bucket, plain_server, tls_server, upstream_server
from tests.clients.table import render
from tests.support.requests import OWNER
from tests.support.tree import repository

_INSTALL_S = 900


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over http."""
    with plain_server(tmp_path_factory.mktemp("clients")) as url:
        yield url


@pytest.fixture(scope="module")
def front_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over http that stands in front of another one."""
    with upstream_server(tmp_path_factory.mktemp("clients-upstream")) as url:
        yield url


@pytest.fixture(scope="module")
def tls_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server over https, and the authority to trust."""
    with tls_server(tmp_path_factory.mktemp("clients-tls")) as url_and_authority:
        yield url_and_authority


@pytest.mark.timeout(LIMIT_S + _INSTALL_S)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_stores_reads_lists_and_deletes(endpoint: str, client: Client) -> None:
    """The reason people would put this in front of tools they have."""
    expect_everything(client, Target(endpoint, *OWNER, client.bucket))


@pytest.mark.timeout(LIMIT_S + _INSTALL_S)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_does_the_same_in_front_of_another_service(front_endpoint: str, client: Client) -> None:
    """Objects then lie upstream, and every verb passes through."""
    expect_everything(client, Target(front_endpoint, *OWNER, client.bucket))


@pytest.mark.timeout(LIMIT_S + _INSTALL_S)
@pytest.mark.parametrize("client", OVER_TLS, ids=lambda client: client.name)
def test_a_client_does_the_same_over_tls(tls_endpoint: tuple[str, Path], client: Client) -> None:
    """SDKs change how they send bodies over https: unsigned, with the checksum in a trailer."""
    url, authority = tls_endpoint
    expect_everything(client, Target(url, *OWNER, client.bucket, ca_file=str(authority)))


def expect_everything(client: Client, target: Target) -> None:
    """Every operation the client has succeeds."""
    if client.environment is not None:
        install(client.environment)
    make_bucket(target)
    failures = run(client, target).failures
    assert not failures, "\n".join(failures)


def test_the_compatibility_table_names_every_client() -> None:
    """A client added here has to appear in the docs: `make compatibility` writes them."""
    written = (repository() / "docs" / "reference" / "compatibility.md").read_text()
    for client in CLIENTS:
        assert f"| {client.name} |" in written, client.name
    assert "**no**" not in written


def test_a_table_shows_what_failed_and_why_a_verb_is_absent() -> None:
    """The generator must not turn a failure or a missing verb into a yes."""
    outcomes = {"put": (True, ""), "get": (False, "different bytes"), "list": (None, "no such verb")}
    results = [Result("c", "1", operation, ok, why) for operation, (ok, why) in outcomes.items()]
    fronted = [Result("c", "1", operation, operation == "put", "") for operation in outcomes]
    assert "| c | 1 | yes | **no** (1) | n/a (2) | yes |" in render([results], [results], [])
    table = render([results], [fronted], [])
    assert "| c | 1 | yes | **no** (1) | n/a (2) | **no**: list |" in table
    assert "1. different bytes\n2. no such verb\n" in table
