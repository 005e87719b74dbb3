"""The files of a process's metrics have their room before anything is written there."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from objectcache.adapters import metrics


def test_no_file_has_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever fills the memory later than that ends no process: writing to a hole would (SIGBUS)."""
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    metrics._reserve_files()
    found = sorted(tmp_path.iterdir())
    assert [file.name.partition("_")[0] for file in found] == ["counter", "gauge", "histogram"]
    assert all(file.stat().st_blocks * 512 >= metrics.FILE_BYTES for file in found)


def test_a_process_alone_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metrics.FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    metrics._reserve_files()
    assert list(tmp_path.iterdir()) == []


def write(folder: Path, pid: int, by_label: dict[str, float]) -> None:
    """The files that a process leaves: a counter, a histogram and a gauge."""
    for kind in ("counter", "histogram", "gauge_livesum"):
        values = MmapedDict(str(folder / f"{kind}_{pid}.db"))
        for label, value in by_label.items():
            names = {"op": label} | ({"le": "+Inf"} if kind == "histogram" else {})
            name = f"test_{kind}"
            values.write_value(
                mmap_key(name, f"{name}_bucket" if "le" in names else name, list(names), list(names.values()), "-"),
                value,
                0.0,
            )
        values.close()


def shown(folder: Path) -> list[str]:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return sorted(line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#"))


def test_processes_that_ended_leave_their_sums_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each restart would otherwise leave 2 MiB of memory, and make each scrape longer for ever."""
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    write(tmp_path, 1, {"get": 1, "put": 2})
    counted: list[str] = []
    for pid in range(10, 15):
        write(tmp_path, pid, {"get": pid, f"only{pid}": 1})
        before = shown(tmp_path)
        metrics.forget_process(pid)
        counted = shown(tmp_path)
        assert [line for line in before if "gauge" not in line] == [line for line in counted if "gauge" not in line]
    assert 'test_counter_total{op="get"} 61.0' in counted or 'test_counter{op="get"} 61.0' in counted
    assert 'test_histogram_count{op="get"} 61.0' in counted
    assert 'test_gauge_livesum{op="get"} 1.0' in counted
    assert sorted(file.name for file in tmp_path.glob("*.db")) == [
        "counter_1.db",
        "counter_ended.db",
        "gauge_livesum_1.db",
        "histogram_1.db",
        "histogram_ended.db",
    ]


def test_a_file_whose_process_ended_while_it_wrote_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    for pid in (1, 2):
        write(tmp_path, pid, {"get": 1})
    torn = tmp_path / "counter_2.db"
    torn.write_bytes(torn.read_bytes()[:8] + b"\xff\xff\xff\x7f" + torn.read_bytes()[12:])
    metrics.forget_process(1)
    metrics.forget_process(2)
    assert "the counters in counter_2.db are lost" in caplog.text
    assert any(line.startswith("test_counter") and line.endswith(" 1.0") for line in shown(tmp_path))
