"""A place at an endpoint that strangers reach is given up by one that has not shown who it is."""

from __future__ import annotations

from objectcache.adapters import zmtp


def test_a_host_pushes_its_own_connections_out_first() -> None:
    """Another host's engine, which has had nothing to say yet, stays."""

    class Peer:
        def __init__(self, origin: str, is_trusted: bool = False) -> None:
            self.origin, self.is_trusted = origin, is_trusted

    def leaving(*peers: Peer) -> int | None:
        return zmtp._leaving(dict(enumerate(peers)))  # type: ignore[arg-type,return-value]

    assert leaving(Peer("engine"), Peer("stranger"), Peer("stranger")) == 1
    assert leaving(Peer("stranger", True), Peer("stranger", True), Peer("engine")) == 2
    assert leaving(Peer("a", True), Peer("b", True)) is None
