"""docs/reference/metrics.md and descriptors.metrics say the same, and names follow one rule."""

from __future__ import annotations

import re

import pytest

from descriptors.metrics import CLUSTER, GATEWAY, ORCHESTRATOR, STORAGE, Metric, MetricKind
from tests.support.tree import repository

EVERY = (*GATEWAY, *CLUSTER, *STORAGE, *ORCHESTRATOR)
_ROW = re.compile(r"\| `(objectcache_\w+)` \| (\w+) \| (.*?) \| (.*) \|")
UNITS = (
    "seconds", "bytes", "requests", "errors", "chunks", "extents", "journals", "records", "stores", "files", "objects",
    "flows", "epochs", "agents", "regions", "transfers", "starts", "commits", "changes", "bytes_per_second", "tokens",
    "blocks", "engines", "failovers", "mismatches", "gaps", "portions", "ratio", "nats",
)  # fmt: skip


def test_the_page_lists_every_metric_as_it_is_and_no_other() -> None:
    rows = _ROW.findall((repository() / "docs" / "reference" / "metrics.md").read_text())
    expected = [
        (each.name, each.kind.value, ", ".join(f"`{label}`" for label in each.labels), each.meaning) for each in EVERY
    ]
    assert rows == expected


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.name)
def test_names_say_subsystem_and_unit(metric: Metric) -> None:
    """As Prometheus has them; `_total` is a counter's and only a counter's."""
    name = metric.name.removesuffix("_total")
    assert re.fullmatch(r"objectcache_[a-z]+(_[a-z]+)+", name)
    assert name.endswith(UNITS)
    assert metric.name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
    assert bool(metric.buckets) is (metric.kind is MetricKind.HISTOGRAM)
    assert metric.buckets == tuple(sorted(metric.buckets))
    assert metric.meaning.endswith(".")


def test_no_label_holds_what_a_client_chooses() -> None:
    """A client could make series without end, and read what others do."""
    labels = {label for metric in EVERY for label in metric.labels}
    own = {"path", "reason", "source", "state", "engine"}  # an engine's name is an operator's choice
    own |= {"bucket"}  # of caches, of which a bounded number is told
    assert labels == {"operation", "status", "code", "codec", "phase", "transport", "mode", "outcome", "basis", *own}


def test_no_metric_is_there_twice() -> None:
    assert len({metric.name for metric in EVERY}) == len(EVERY)
