"""A fetch ends, whatever becomes of its request: nobody waits for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Descriptor, RdmaTarget
from descriptors.errors import ErrorCode, ServerError
from descriptors.notices import Admitted, Done, Mode
from nixl_client.fetch.layer_fetch import LayerFetch
from nixl_client.fetch.one_sided import OneSidedFetches
from nixl_client.transports.buffers import as_buffer
from nixl_client.transports.http import UnansweredError
from nixl_client.transports.transport import Transport

DESCRIPTOR = Descriptor(("a", "b"), 2, 16, 1_000, rdma_target=RdmaTarget("agent", "kv", 0, 4_000), request_id="r" * 16)


class LostHttp:
    """The descriptor's answer is lost, and so are the first `lost_stops` requests to stop it."""

    def __init__(self, fetch_says: Any, lost_stops: int) -> None:
        self._fetch_says = fetch_says
        self._lost_stops = lost_stops

    def request(self, method: str, *_: object, **__: object) -> Any:
        if method == "POST":
            self._fetch_says()
        elif self._lost_stops == 0:
            return None
        else:
            self._lost_stops -= 1
        raise UnansweredError("the connection broke")


class QuietReceiver:
    def listen(self, *_: object) -> None: ...

    def stop_listening(self, *_: object) -> None: ...


def run(notices: list[Any], lost_stops: int = 1_000) -> LayerFetch:
    def says() -> None:
        for notice in notices:
            fetch.on_notice(notice)

    http: Any = LostHttp(says, lost_stops)
    agent: Any = SimpleNamespace(receiver=QuietReceiver())
    fetches = OneSidedFetches(http, agent)
    fetch = LayerFetch(
        DESCRIPTOR, as_buffer(np.zeros(4_000, np.uint8)), 0, fetches.cancel, Transport.SHM, "bucket", 5.0
    )
    fetches.run(fetch)
    return fetch


def test_done_without_an_answer_is_the_end() -> None:
    """The server has said that it will not touch the buffer again."""
    fetch = run([Admitted("r" * 16, Mode.LAYER_MAJOR, 2), Done("r" * 16, 4_000)])
    assert fetch.wait(1).chunk_count == 2
    assert fetch.is_settled


def test_neither_done_nor_an_answer_is_an_error_and_the_buffer_stays_the_servers() -> None:
    fetch = run([Admitted("r" * 16, Mode.LAYER_MAJOR, 2)])
    with pytest.raises(ServerError) as failed:
        fetch.wait(1)
    assert failed.value.code is not ErrorCode.CANCELLED
    assert not fetch.is_settled


def test_a_stop_that_is_lost_is_asked_for_again() -> None:
    """A network that breaks one connection often breaks the next one, too; the buffer must come back all the same."""
    fetch = run([Admitted("r" * 16, Mode.LAYER_MAJOR, 2)], lost_stops=2)
    assert fetch.is_settled
    with pytest.raises(ServerError):
        fetch.wait(1)
