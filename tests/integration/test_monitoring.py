"""The Prometheus rules and the Grafana dashboard of docker/. A real Prometheus scrapes a server and answers all."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.beds.processes import free_port
from descriptors.metrics import CLUSTER, GATEWAY, ORCHESTRATOR, STORAGE, MetricKind
from tests.support.servers import CONFIG, Stack, stack
from tests.support.tree import repository
from tests.support.waiting import eventually

PROMETHEUS = repository() / "docker" / "prometheus"
DASHBOARD = json.loads((repository() / "docker" / "grafana" / "objectcache.json").read_text())
TOKEN = "a-long-random-text"
NAME = re.compile(r"\b(?:objectcache|process)_\w+")
OTHERS = {
    "objectcache_build_info", "process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"
}  # fmt: skip
EVERY = (*GATEWAY, *CLUSTER, *STORAGE, *ORCHESTRATOR)
KNOWN = OTHERS | {each.name + "_bucket" * (each.kind is MetricKind.HISTOGRAM) for each in EVERY}
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no Prometheus: apt-get install prometheus"
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_dashboard_asks_for_metrics_that_are_there(expression: str) -> None:
    named = set(NAME.findall(expression))
    assert named
    assert named <= KNOWN


def test_the_rules_ask_for_metrics_that_are_there() -> None:
    expressions = re.sub(r"(?m)^\s*(?:#.*|(?:summary|description):.*)$", "", (PROMETHEUS / "rules.yml").read_text())
    assert set(NAME.findall(expressions)) <= KNOWN


def test_every_panel_says_what_it_shows() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@needs_prometheus
def test_promtool_is_content() -> None:
    for words in (
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
        ("check", "config", "prometheus.yml"),
    ):
        done = subprocess.run(["promtool", *words], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[tuple[Stack, str]]:
    """A server, and a Prometheus with our configuration that scrapes it every second."""
    with stack("together", tmp_path / "server", f'{CONFIG}\n[gateway]\nmetrics_token = "{TOKEN}"\n') as running:
        shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
        file = tmp_path / "prometheus" / "prometheus.yml"
        text = file.read_text().replace("127.0.0.1:9000", urllib.parse.urlsplit(running.url).netloc)
        file.write_text(text.replace("scrape_interval: 15s", "scrape_interval: 1s\n  evaluation_interval: 1s"))
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        arguments = [
            f"--config.file={file}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (
            (tmp_path / "log").open("wb") as log,
            subprocess.Popen(["prometheus", *arguments], stdout=log, stderr=log) as server,
        ):
            try:
                yield running, url
            finally:
                server.terminate()
                server.wait(timeout=30)


def asked(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=30) as answer:
        return json.load(answer)["data"]


def value_of(url: str, expression: str) -> list[Any]:
    return list(asked(url, f"query?{urllib.parse.urlencode({'query': expression})}")["result"])


def until_told(url: str, expression: str) -> list[Any]:
    """The answer, once Prometheus is up and has scraped so much that there is one."""
    found: list[Any] = []

    def is_told() -> bool:
        with contextlib.suppress(OSError):
            found[:] = value_of(url, expression)
        return bool(found)

    assert eventually(is_told), f"no answer to {expression}"
    return found


@pytest.mark.slow
@needs_prometheus
def test_a_real_prometheus_scrapes_a_server_and_answers_every_panel(scraped: tuple[Stack, str]) -> None:
    server, url = scraped
    server.s3().create_bucket(Bucket="monitored")
    assert [each["value"][1] for each in until_told(url, 'up{job="objectcache"} == 1')] == ["1"]
    (put,) = until_told(url, 'objectcache_gateway_requests_total{operation="create_bucket",status="200"}')
    assert put["value"][1] == "1"
    for expression in EXPRESSIONS:
        value_of(url, expression.replace("$__rate_interval", "1m").replace("$instance", ".*"))
    groups = asked(url, "rules")["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
    assert len(groups[0]["rules"]) == 12
    server.processes[0].terminate()
    server.processes[0].wait()
    (alert,) = until_told(url, 'ALERTS{alertname="ObjectCacheDown"}')
    assert alert["metric"]["alertstate"] in ("pending", "firing")
