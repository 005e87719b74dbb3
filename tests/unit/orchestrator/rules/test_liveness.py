"""When an engine is sent requests."""

from __future__ import annotations

from objectcache.orchestrator.rules.liveness import EJECTED_S, EJECTED_S_MAX, FORGIVEN_S, EngineStatus, Liveness


def test_an_engine_takes_requests_after_its_first_good_probe() -> None:
    engine = Liveness()
    assert engine.status(0.0) is EngineStatus.HALF_OPEN
    assert not engine.takes_requests(0.0)
    engine.succeeded(0.0)
    assert engine.takes_requests(0.0)


def test_failures_in_a_row_eject_it_and_others_do_not() -> None:
    engine = Liveness()
    engine.succeeded(0.0)
    for _ in range(5):
        engine.failed(1.0, "slow")
        engine.failed(1.0, "slow")
        engine.succeeded(1.0)
    assert engine.takes_requests(1.0)
    for _ in range(3):
        engine.failed(2.0, "slow")
    assert engine.status(2.0) is EngineStatus.EJECTED
    assert engine.last_error == "slow"


def test_requests_alone_do_not_eject_an_engine_that_is_needed() -> None:
    """A client may send requests at which every engine ends the connection: then no engine was left for others."""
    engine = Liveness()
    engine.succeeded(0.0)
    for _ in range(10):
        engine.failed(1.0, "the connection ended", is_needed=True)
    assert engine.takes_requests(1.0)
    engine.failed(1.0, "the connection ended")
    assert engine.status(1.0) is EngineStatus.EJECTED, "another engine has come"
    for how in ({"is_probe": True}, {"is_certain": True}):
        engine = Liveness()
        engine.succeeded(0.0)
        for _ in range(3):
            engine.failed(1.0, "not well", is_needed=True, **how)
        assert engine.status(1.0) is EngineStatus.EJECTED


def test_a_refused_connection_ejects_at_once_and_each_time_for_longer() -> None:
    engine, now_s, lengths = Liveness(), 0.0, []
    engine.succeeded(now_s)
    for _ in range(6):
        engine.failed(now_s, "refused", is_certain=True)
        lengths.append(engine.ejected_until_s - now_s)
        now_s = engine.ejected_until_s
        assert engine.status(now_s) is EngineStatus.HALF_OPEN
    assert lengths == [EJECTED_S, 4.0, 8.0, 16.0, EJECTED_S_MAX, EJECTED_S_MAX]
    engine.succeeded(now_s)
    engine.succeeded(now_s + FORGIVEN_S)
    engine.failed(now_s + FORGIVEN_S, "refused", is_certain=True)
    assert engine.ejected_s == EJECTED_S


def test_what_was_begun_before_an_ejection_proves_nothing() -> None:
    engine = Liveness()
    engine.succeeded(0.0)
    engine.failed(1.0, "refused", is_certain=True)
    engine.succeeded(1.5)
    assert engine.status(1.5) is EngineStatus.EJECTED


def test_a_draining_engine_gets_no_requests_and_comes_back() -> None:
    engine = Liveness()
    engine.succeeded(0.0)
    engine.drain(is_wanted=True)
    assert engine.status(0.0) is EngineStatus.DRAINING
    engine.drain(is_wanted=False)
    assert engine.takes_requests(0.0)
