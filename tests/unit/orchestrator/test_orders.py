"""The orders that the orchestrator takes over from a file."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from objectcache.orchestrator import orders as orders_module
from objectcache.orchestrator.gate import Gate
from objectcache.orchestrator.orders import Orders
from objectcache.orchestrator.rules.admission import AdmissionSettings, Tenant
from objectcache.orchestrator.rules.policies import Sessions
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.writing import Writing


def test_a_quota_that_cannot_be_read_does_not_count_and_stays(tmp_path: Path) -> None:
    """The orchestrator did not start again, for example after a return to an older release."""
    writing = Writing(tmp_path, PrefixIndex(), Sessions())
    wrong = {"a": "garbage", "b": '{"weight": 1, "tokens_per_s": 5}', "c": "[]", "d": "null", "e": "[" * 10_000}
    for name, document in {**wrong, "good": '{"weight": 2}'}.items():
        writing.metadata.set_quota(name, document)
    tenants = [Tenant(name) for name in (*wrong, "good")]
    orders = Orders([], tenants, Gate(AdmissionSettings()), writing, None)
    assert [orders.tenant(each).weight for each in tenants] == [1.0] * len(wrong) + [2.0]
    assert writing.metadata.quotas().keys() == {*wrong, "good"}
    writing.metadata.close()


def test_quotas_of_others_take_few_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever writes to etcd chooses the names of fields, and how often an entry changes."""
    orders = Orders([], [Tenant("a")], Gate(AdmissionSettings()), None, None)
    for number in range(20):
        orders.follow_quotas({"a": {f"{number}\nWARNING forged" + "x" * 10_000: 1}})
    (record,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    assert len(record.getMessage()) < 700
    assert "\n" not in record.getMessage()


async def test_a_clock_that_is_ahead_takes_no_pins_away_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any order, and a start, took away all pins that ended within the time by which the clock was ahead, for all
    orchestrators.
    """
    monkeypatch.setattr(orders_module, "PINS_MAX", 2)
    ends_s = time.time() + 3600
    names = [digit * 32 for digit in "0123"]
    writing = Writing(tmp_path, PrefixIndex(), Sessions())
    orders = Orders(["a"], [], Gate(AdmissionSettings()), writing, None)
    await orders.pin(names[0], {"engine": "a", "until": ends_s})
    monkeypatch.setattr(orders_module.time, "time", lambda: ends_s + 3600)  # type: ignore[attr-defined]
    await orders.pin(names[1], {"engine": "a"})
    assert set(orders.pins) == set(names[:2])
    again = Orders(["a"], [], Gate(AdmissionSettings()), writing, None)
    assert again.pins == orders.pins
    await again.pin(names[2], {"engine": "a"})
    assert set(again.pins) == set(writing.metadata.pins()) == set(names[1:3]), "one that is over makes room"
    with pytest.raises(ValueError, match="there are 2 pins already"):
        await again.pin(names[3], {"engine": "a"})
    await writing.stop()
