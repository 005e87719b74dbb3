"""The ladder's figures measure what they say, compare every byte, and say what they left out."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cli import run
from bench.content import VerificationError
from bench.ladder import page_cache, raw_store
from bench.ladder import run as ladder_run
from bench.ladder.bed import LadderSettings, Session
from bench.ladder.blocks import BLOCK_BYTES, even_parts
from bench.ladder.elements import PAPER, PAPER_PAYLOADS, element_counts, planned_elements
from bench.ladder.many_objects import speedups
from bench.ladder.models import MODELS, GroupedQuery, Latent
from bench.ladder.paths import S3Path
from bench.ladder.payloads import layer_payloads
from bench.ladder.plots import plot_figure
from bench.ladder.results import Cell, Figure, FigureName, State, figure_json, figure_table
from bench.ladder.rounds import Task, run_rounds
from bench.ladder.run import Plan, run_figures
from bench.ladder.timing import Part, Seen, parse_timing, split
from bench.ladder.transfers import Work, clear, make_work, place, verify
from bench.objects import ObjectContent
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB

TABLES = json.loads((Path(__file__).parent / "data" / "paper_tables.json").read_text())
SETTINGS = LadderSettings(runs=1, seed=1, is_smoke=True)


def test_smoke_draws_and_verifies_every_figure(tmp_path: Path) -> None:
    """CI runs the smoke; whoever reads the JSON relies on these names."""
    file, charts = tmp_path / "ladder.json", tmp_path / "charts"
    assert run(["ladder", "--smoke", "--json", str(file), "--plot", str(charts)]) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert result["machine"]["cpu_model"]
    assert "commit" in result
    assert result["settings"]["seed"] == 1
    assert set(result["figures"]) == {name.value for name in FigureName}
    for name, figure in result["figures"].items():
        assert figure["state"] == "done", figure["reason"]
        assert (charts / f"figure-{name.lower()}.png").stat().st_size > 0
        for cell in figure["cells"]:
            assert cell["sample_count"] == len(cell["samples_s"]) >= 1
            assert cell["duration_s"]["min"] <= cell["duration_s"]["median"] <= cell["duration_s"]["max"]


@pytest.mark.parametrize("column", TABLES["table_a7"], ids=lambda row: f"{row['context']}-G{row['chunk_tokens']}")
def test_element_counts_are_those_of_table_a7(column: dict[str, int | str]) -> None:
    """The server's own plan, column by column (paper, Table A7)."""
    context, chunk_tokens = str(column["context"]), int(column["chunk_tokens"])
    assert asdict(planned_elements(context, chunk_tokens, PAPER_PAYLOADS[chunk_tokens])) == column


def test_the_bench_compares_with_the_whole_of_table_a7() -> None:
    """The copy of the table that travels with the bench is the one the tests have."""
    assert [asdict(column) for column in PAPER] == TABLES["table_a7"]
    assert element_counts().state is State.DONE


def test_layer_payloads_are_the_papers_where_it_gives_them() -> None:
    """Figure 2's baseline, Table A8's 4096 bytes a token, section 2.1's 1 MB for 256 tokens."""
    llama = next(model for model in MODELS if model.name == "Llama 3.1 8B")
    assert llama.payload_bytes(16) == 64 * KIB
    assert llama.payload_bytes(256) == MIB
    assert llama.attention.token_bytes() == 4096
    assert Latent(512, 0).token_bytes() * 16 == 16 * KIB
    assert GroupedQuery(8, 128).token_bytes() == 4096


def test_every_model_names_its_source_once() -> None:
    """A constant without a source cannot be checked."""
    sources = [model.source for model in MODELS]
    assert len(set(sources)) == len(sources)
    assert all(source.count("/") == 1 for source in sources)
    rows = layer_payloads().rows
    assert [row["payload_bytes"] for row in rows] == sorted(row["payload_bytes"] for row in rows)


@given(count=st.integers(0, 300), parts=st.integers(1, 40))
def test_parts_cover_everything_once_and_evenly(count: int, parts: int) -> None:
    """No request is lost between threads, and none waits for a much longer one."""
    found = even_parts(count, parts)
    assert [index for part in found for index in part] == list(range(count))
    assert len(found) == min(count, parts)
    assert not found or max(map(len, found)) - min(map(len, found)) <= 1


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    """A slow minute must not hit one contender alone, nor a cold start any."""
    order: list[str] = []

    def taking(name: str) -> Callable[[], float]:
        def one() -> float:
            order.append(name)
            return float(len(order))

        return one

    cells = run_rounds([Task({"what": name}, 1, taking(name)) for name in "ab"], 2, "")
    assert "".join(order) == "ababab"
    assert [cell.samples_s for cell in cells] == [(3.0, 5.0), (4.0, 6.0)]


def test_a_cell_keeps_its_raw_samples() -> None:
    """Ratios are computed from them by whoever reads the file."""
    figure = Figure(
        FigureName.RAW_STORE,
        "",
        State.DONE,
        cells=[Cell({"way": "preadv", "block_bytes": 64 * KIB}, 8, (1.0, 4.0, 2.0))],
    )
    cell = figure_json(figure)["cells"][0]
    assert cell["samples_s"] == [1.0, 4.0, 2.0]
    assert cell["throughput_bytes_per_s"] == {"median": 4.0, "min": 2.0, "max": 8.0}
    assert "64 KiB" in figure_table(figure)


def test_what_is_absent_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that cannot run here is no failure of the others, and never passed over in silence."""

    def lacking(_: Session) -> Figure:
        raise ImportError("no module named 'tokenizers'")

    plans = {**ladder_run.PLANS, FigureName.HASHING: Plan("", lacking)}
    monkeypatch.setattr(ladder_run, "PLANS", plans)
    shown: list[Figure] = []
    report = run_figures([FigureName.HASHING, FigureName.ELEMENTS], SETTINGS, {}, shown.append)
    assert [figure.state for figure in shown] == [State.NOT_RUN, State.DONE]
    assert "tokenizers" in shown[0].reason
    assert report.problem is None


def test_wrong_bytes_fail_the_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast wrong answer is no result."""
    monkeypatch.setattr(ObjectContent, "holds", lambda *_: False)
    file = tmp_path / "ladder.json"
    assert run(["ladder", "--smoke", "--figures", "8,A7", "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert result["verified"] is False
    assert "wrong bytes" in result["problem"]
    assert result["figures"]["8"]["state"] == "failed"
    assert result["figures"]["A7"]["state"] == "done"


def test_an_object_in_two_pieces_is_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure 8 reads whole objects at one place; anything else would be another measurement."""
    monkeypatch.setattr(raw_store, "connect", lambda _: io.BytesIO())
    monkeypatch.setattr(raw_store, "prefix", lambda *_: [None])
    with pytest.raises(VerificationError):
        raw_store._find(tmp_path, ["key"])


def works(count: int, in_flight: int) -> Iterator[tuple[Work, Delivery]]:
    """A filled buffer in either order."""
    layout = ChunkLayout(3, 1, 32)
    for delivery in (Delivery.CHUNK_MAJOR, Delivery.LAYER_MAJOR):
        work = make_work("key/", layout, count, np.zeros(layout.payload_bytes(count), dtype=np.uint8), seed=5)
        place(work, in_flight, delivery)
        yield work, delivery


@given(count=st.integers(1, 20), in_flight=st.integers(1, 24))
def test_what_is_laid_out_verifies_in_its_own_order_only(count: int, in_flight: int) -> None:
    """Puts are laid out as gets are compared, part by part."""
    for work, delivery in works(count, in_flight):
        verify(work, in_flight, delivery)
        other = Delivery.CHUNK_MAJOR if delivery is Delivery.LAYER_MAJOR else Delivery.LAYER_MAJOR
        if max(map(len, work.parts(in_flight))) > 1:
            with pytest.raises(VerificationError):
                verify(work, in_flight, other)


@given(at=st.integers(0, 5 * 96 - 1), in_flight=st.integers(1, 6))
def test_one_flipped_byte_is_found(at: int, in_flight: int) -> None:
    """Whatever part it is in."""
    for work, delivery in works(5, in_flight):
        work.buffer[at] ^= 1
        with pytest.raises(VerificationError):
            verify(work, in_flight, delivery)


def test_a_cleared_buffer_does_not_verify() -> None:
    """Bytes of the run before must not pass for this one's."""
    for work, delivery in works(4, 2):
        clear(work)
        with pytest.raises(VerificationError):
            verify(work, 2, delivery)


def test_the_server_s_account_is_read_in_seconds() -> None:
    """Names this bench does not know are another's business."""
    parts = parse_timing("gateway;dur=0.31, storage;dur=2.10, transfer;dur=5, cache;dur=1")
    assert parts == {Part.GATEWAY: 0.31 / 1e3, Part.STORAGE: 2.1 / 1e3, Part.TRANSFER: 5 / 1e3}


@pytest.mark.parametrize("text", ["", "gateway", "gateway;dur=", "gateway;dur=-1", "gateway;dur=1;desc=x"])
def test_an_account_that_cannot_be_read_is_refused(text: str) -> None:
    """A part left out would be counted as the client's."""
    with pytest.raises(ValueError, match="not understood"):
        parse_timing(text)


@pytest.mark.parametrize("is_body_the_payload", [True, False])
def test_parts_of_a_request_add_up(is_body_the_payload: bool) -> None:
    """Nothing of the time is lost or counted twice."""
    seen = Seen(head_s=4.0, total_s=10.0, server_s={Part.GATEWAY: 1.0, Part.STORAGE: 2.0, Part.TRANSFER: 0.5})
    parts = split(seen, is_body_the_payload=is_body_the_payload)
    assert sum(parts.values()) == pytest.approx(10.0)
    assert parts[Part.TRANSFER] == (6.5 if is_body_the_payload else 0.5)


def test_speedups_compare_the_best_concurrency_of_each_path() -> None:
    """A path must not look good because another was run with too few requests in flight."""

    def cell(path: str, in_flight: int, seconds: float) -> Cell:
        labels = {"path": path, "operation": "GET", "block_bytes": 64 * KIB, "in_flight": in_flight}
        return Cell(labels, 100, (seconds,))

    cells = [cell("S3RDMA Direct", 8, 4.0), cell("S3RDMA Direct", 32, 2.0), cell("S3RDMA Agg", 1, 0.5)]
    (row,) = speedups(cells)
    assert row["agg_over_direct"] == 4.0
    assert row["batch_over_direct"] is None


def test_a_latency_chart_has_a_bar_for_each_case(tmp_path: Path) -> None:
    """Four parts, stacked, whatever the number of samples."""
    cells = [
        Cell({"path": path.value, "operation": "GET", "block_bytes": size, "part": part.value}, 0, (0.001, 0.002))
        for path in S3Path
        for size in (64 * KIB, MIB)
        for part in Part
    ]
    path = tmp_path / "chart.png"
    plot_figure(Figure(FigureName.LATENCY, "latency", State.DONE, cells=cells), path)
    assert path.stat().st_size > 0


def test_dropped_files_are_not_resident(tmp_path: Path) -> None:
    """Cold has to be seen, not hoped for."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    fd = os.open(path, os.O_RDWR)
    try:
        assert page_cache.resident_share(fd) == 1.0
        page_cache.drop(fd)
        assert page_cache.resident_share(fd) <= raw_store.RESIDENT_SHARE_MAX
    finally:
        os.close(fd)


def test_the_ladder_has_the_papers_block_sizes() -> None:
    """64 KiB to 4 MiB (paper, section 5.1)."""
    assert BLOCK_BYTES[0] == 64 * KIB
    assert BLOCK_BYTES[-1] == 4 * MIB


@pytest.mark.parametrize("arguments", [["--figures", "3"], ["--figures", "8,8"], ["--transport", "pigeon"]])
def test_wrong_use_of_the_ladder_is_refused(arguments: list[str]) -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit) as ended:
        run(["ladder", *arguments])
    assert ended.value.code == 2


def test_a_report_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    """Minutes of measuring must not end in a missing folder."""
    assert run(["ladder", "--smoke", "--json", str(tmp_path / "absent" / "ladder.json")]) == 2
