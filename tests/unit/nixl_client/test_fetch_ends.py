"""A fetch ends, whatever becomes of its request: nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import (
    EXTENDED_VERSION,
    PROTOCOL_VERSION,
    Accept,
    Delivery,
    Descriptor,
    OnMissing,
    RdmaTarget,
)
from descriptors.errors import ChunkUnavailable, ErrorCode, ServerError
from descriptors.headers import CHUNKS_HEADER, MODE_HEADER, RDMA_BYTES_HEADER
from descriptors.layer_forms import EXACT, FormRun, LayerForms
from descriptors.notices import Admitted, Done, Failed, LayerReady, Mode
from descriptors.storage_api import Grant
from nixl_client.fetch import one_sided
from nixl_client.fetch.fetch_ledger import FetchLedger, FetchPlace
from nixl_client.fetch.layer_fetch import LayerFetch
from nixl_client.fetch.one_sided import OneSidedFetches
from nixl_client.session.signed_http import SignedAnswer, parse_error
from nixl_client.transports.buffers import as_buffer
from nixl_client.transports.http import UnansweredError
from nixl_client.transports.transport import Transport
from tests.support.played_http import PlayedHttp

DESCRIPTOR = Descriptor(("a", "b"), 2, 16, 1_000, rdma_target=RdmaTarget("agent", "kv", 0, 4_000), request_id="r" * 16)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits as long as a client does."""
    monkeypatch.setattr(one_sided, "STOP_PAUSES_S", (0.0, 0.001, 0.002))


class LostHttp(PlayedHttp):
    """The descriptor's answer is lost, and so are the first `lost_stops` requests to stop it."""

    def __init__(self, fetch_says: Any, lost_stops: int) -> None:
        super().__init__()
        self._fetch_says = fetch_says
        self._lost_stops = lost_stops

    def request_once(self, method: str, *_: object, **__: object) -> Any:
        if method == "POST":
            self._fetch_says()
        elif self._lost_stops == 0:
            return None
        else:
            self._lost_stops -= 1
        raise UnansweredError("the connection broke")


class RefusingHttp(PlayedHttp):
    """The answer says that layer 1 failed; the notices that were sent before it come `late_s` after it, if ever."""

    def __init__(self, fetch_says: Any, late_s: float | None) -> None:
        super().__init__()
        self._fetch_says = fetch_says
        self._late_s = late_s

    def request_once(self, *_: object, **__: object) -> Any:
        if self._late_s is not None:
            threading.Timer(self._late_s, self._fetch_says).start()
        raise ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, "chunk_keys[1] is damaged", index=1, layer=1)


class ProxiedHttp(PlayedHttp):
    """A proxy gives the first descriptor up, while the server may go on; the second one is answered."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.asked: list[str] = []

    def request_once(self, method: str, path: str, *_: object, **__: object) -> Any:
        self.asked.append(method)
        if method == "POST" and self.asked.count("POST") == 1:
            raise parse_error(504, b"<html>gateway timeout</html>")
        headers = {MODE_HEADER: "layer-major", CHUNKS_HEADER: "2", RDMA_BYTES_HEADER: "4000"}
        return SignedAnswer(headers, b"") if method == "POST" else None


class QuietReceiver:
    """`have_ended` says whether the servers that may write have."""

    def __init__(self, *, have_ended: bool = False) -> None:
        self._have_ended = have_ended

    def writers(self) -> Callable[[], bool]:
        return lambda: self._have_ended

    def listen(self, *_: object) -> None: ...

    def stop_listening(self, *_: object) -> None: ...


def run(notices: list[Any], lost_stops: int = 1_000) -> LayerFetch:
    return run_over(lambda says: LostHttp(says, lost_stops), notices)


def run_over(make_http: Callable[[Any], Any], notices: list[Any], *, have_ended: bool = False) -> LayerFetch:
    def says() -> None:
        for notice in notices:
            running.on_notice(notice)

    http = make_http(says)
    agent: Any = SimpleNamespace(receiver=QuietReceiver(have_ended=have_ended), writers_header=lambda: None)
    fetches = OneSidedFetches(http, agent)
    place = FetchPlace(as_buffer(np.zeros(4_000, np.uint8)), 0, 4_000)
    running = FetchLedger(DESCRIPTOR, place, "bucket", 5.0)
    fetches.run(running)
    return LayerFetch(running, fetches.cancel, Transport.SHM)


def test_a_server_behind_a_proxy_that_gave_up_is_stopped_before_it_is_asked_again() -> None:
    """Two deliveries into one buffer would outlive the fetch."""
    http = ProxiedHttp()
    fetch = run_over(lambda says: http, [])
    assert http.asked == ["POST", "DELETE", "POST"]
    assert fetch.wait(1).chunk_count == 2


@pytest.mark.parametrize("have_ended", [False, True])
def test_the_buffer_comes_back_from_a_server_that_has_surely_ended_and_from_no_other(have_ended: bool) -> None:
    """Nobody answers: the request is lost, and so is every question to stop it."""
    fetch = run_over(lambda says: LostHttp(says, 1_000), [], have_ended=have_ended)
    assert fetch.is_settled == have_ended
    if not have_ended:
        with pytest.raises(UnansweredError):
            fetch.cancel()


def test_chunks_with_places_keep_them_when_the_fetch_is_begun_again() -> None:
    """For what the caller was told, which may be fewer."""
    running = begun()
    layout = running.descriptor.layout
    running.descriptor = replace(
        running.descriptor,
        delivery=Delivery.CHUNK_MAJOR,
        places=(0, 5_000, 9_000),
        rdma_target=RdmaTarget("agent", "region", 0, 9_000 + layout.chunk_bytes),
        version=EXTENDED_VERSION,
    )
    running.on_start(Mode.CHUNK_MAJOR, 2, Grant())
    assert running.begin_again(LOST)
    assert (running.descriptor.chunk_keys, running.descriptor.places) == (("a", "b"), (0, 5_000))


def begun(accept: Accept | None = None, on_missing: OnMissing = OnMissing.PREFIX) -> FetchLedger:
    descriptor = Descriptor(
        ("a", "b", "c"),
        2,
        16,
        1_024,
        on_missing=on_missing,
        request_id="r" * 16,
        accept=accept,
        version=PROTOCOL_VERSION if accept is None else EXTENDED_VERSION,
    )
    buffer = as_buffer(np.zeros(descriptor.delivery_bytes, np.uint8))
    return FetchLedger(descriptor, FetchPlace(buffer, 0, descriptor.delivery_bytes), "bucket", 5.0)


def waited_for(running: FetchLedger) -> LayerFetch:
    return LayerFetch(running, lambda running: None, Transport.HTTP)


LOST = UnansweredError("lost")


def test_a_fetch_is_begun_again_for_what_the_caller_was_told() -> None:
    """Stored chunks may have become more or fewer meanwhile."""
    fetch = begun()
    fetch.on_start(Mode.CHUNK_MAJOR, 2, Grant())
    assert fetch.begin_again(LOST)
    assert fetch.request_id == "r" * 16 + ".2" == fetch.descriptor.request_id
    wanted = fetch.descriptor
    assert (wanted.chunk_keys, wanted.on_missing) == (("a", "b"), OnMissing.FAIL)
    assert wanted.delivery is Delivery.CHUNK_MAJOR
    assert waited_for(fetch).wait_admitted(0) == (Mode.CHUNK_MAJOR, 2)
    fetch.on_start(Mode.CHUNK_MAJOR, 2, Grant())
    assert not fetch.begin_again(LOST)


def test_a_fetch_that_was_not_admitted_is_begun_again_as_it_was() -> None:
    fetch = begun()
    for number in (2, 3, 4):
        assert fetch.begin_again(LOST)
        assert fetch.request_id == "r" * 16 + f".{number}"
    assert (fetch.descriptor.chunk_keys, fetch.descriptor.on_missing) == (("a", "b", "c"), OnMissing.PREFIX)


def test_a_notice_of_an_earlier_try_tells_nothing() -> None:
    fetch = begun()
    assert fetch.begin_again(LOST)
    fetch.on_notice(Admitted("r" * 16, Mode.LAYER_MAJOR, 1))
    with pytest.raises(TimeoutError):
        waited_for(fetch).wait_admitted(0)
    fetch.on_notice(Admitted(fetch.request_id, Mode.LAYER_MAJOR, 3))
    assert waited_for(fetch).wait_admitted(0) == (Mode.LAYER_MAJOR, 3)


@pytest.mark.parametrize("end", ["layer", "failure", "cancel", "encoded", "refused"])
def test_a_fetch_is_not_begun_again_once_the_caller_may_have_used_it(end: str) -> None:
    accept = Accept(("kivi4-1",), "float16") if end == "encoded" else None
    fetch, error = begun(accept), LOST
    if end == "layer":
        fetch.on_layer(0)
    elif end == "failure":
        fetch.on_failure(ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, "damaged", index=1))
    elif end == "cancel":
        waited_for(fetch).cancel()
    elif end == "encoded":
        fetch.on_start(Mode.LAYER_MAJOR, 3, Grant(), LayerForms((FormRun(3, EXACT, 1_024),)))
    else:
        error = UnansweredError("certificate", retryable=False)
    assert not fetch.begin_again(error)
    assert fetch.request_id == "r" * 16


def test_done_without_an_answer_is_the_end() -> None:
    """The server has said that it will not touch the buffer again."""
    fetch = run([Admitted("r" * 16, Mode.LAYER_MAJOR, 2), Done("r" * 16, 4_000)])
    assert fetch.wait(60).chunk_count == 2
    assert fetch.is_settled


def test_neither_done_nor_an_answer_is_an_error_and_the_buffer_stays_the_servers() -> None:
    fetch = run([Admitted("r" * 16, Mode.LAYER_MAJOR, 2)])
    with pytest.raises(ServerError) as failed:
        fetch.wait(60)
    assert failed.value.code is not ErrorCode.CANCELLED
    assert not fetch.is_settled


def test_a_stop_that_is_lost_is_asked_for_again() -> None:
    """A network that breaks one connection often breaks the next one, too; the buffer must come back all the same."""
    fetch = run([Admitted("r" * 16, Mode.LAYER_MAJOR, 2)], lost_stops=2)
    assert fetch.is_settled
    with pytest.raises(ServerError):
        fetch.wait(60)


@pytest.mark.parametrize("late_s", [0.0, 0.05])
def test_layers_before_a_failed_one_count_although_their_notices_come_after_the_answer(
    monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Notices and the answer come over two connections, in any order."""
    monkeypatch.setattr(one_sided, "NOTICE_WAIT_S", 60.0)
    notices = [Admitted("r" * 16, Mode.LAYER_MAJOR, 2), LayerReady("r" * 16, 0, 0, 2_000), Failed("r" * 16, 1, 1)]
    fetch = run_over(lambda says: RefusingHttp(says, late_s), notices)
    assert fetch.wait_layer(0, 60).chunk_count == 2
    with pytest.raises(ChunkUnavailable):
        fetch.wait(60)


def test_a_failure_is_told_although_the_notices_of_layers_before_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "NOTICE_WAIT_S", 0.01)
    fetch = run_over(lambda says: RefusingHttp(says, None), [])
    assert fetch.is_settled
    with pytest.raises(ChunkUnavailable):
        fetch.wait_layer(0, 60)
