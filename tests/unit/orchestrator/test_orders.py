"""The orders that the orchestrator takes over from a file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

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
