"""The metrics of an orchestrator whose engines may answer anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.gate import Gate
from objectcache.orchestrator.meter import Meter
from objectcache.orchestrator.receipts import Receipt
from objectcache.orchestrator.rules.admission import AdmissionSettings
from objectcache.orchestrator.rules.prefix_index import PrefixIndex


@dataclass
class NoEngines:
    engines: dict[str, Engine] = field(default_factory=dict)
    gate: Gate = field(default_factory=lambda: Gate(AdmissionSettings()))
    index: PrefixIndex = field(default_factory=PrefixIndex)


def test_statuses_that_engines_make_up_share_one_line() -> None:
    """There were four hundred lines for each path, and making them stopped the event loop."""
    meter = Meter()
    for status in (None, *range(200, 600)):
        meter.ended(Receipt("r", "t", "/v1/completions", 0.0, status=status))
    text = meter.text(NoEngines()).decode()
    lines = [line for line in text.splitlines() if line.startswith("objectcache_orchestrator_requests_total{")]
    assert len(lines) < 70
    assert sum(float(line.split()[-1]) for line in lines) == 401
    for status in ("0", "200", "429", "503", "other"):
        assert sum(f'status="{status}"' in line for line in lines) == 1
