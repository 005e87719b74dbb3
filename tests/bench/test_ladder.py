"""The ladder's figures measure what they say, compare every byte, and say what they left out."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.beds.s3_jobs import ObjectContent
from bench.cli import run
from bench.core.show import as_text
from bench.paper.ladder import raw_store
from bench.paper.ladder import run as ladder_run
from bench.paper.ladder.bed import BLOCK_BYTES, LadderSettings, NotRun, Session, even_parts, figure
from bench.paper.ladder.computed import element_counts, layer_payloads, planned_elements
from bench.paper.ladder.moves import FIVE, PARTS, Work, check_account, speedups
from bench.paper.ladder.run import FIGURES, measure_ladder, plot, show
from bench.paper.tables import MODELS, GroupedQuery, Latent, table_a7
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from nixl_client.client import Client
from objectcache.calibration.chunks import Chunks, drop_pages, resident_share
from objectcache.calibration.content import VerificationError, make_content
from objectcache.calibration.samples import Cell, Task, run_rounds
from tests.support.tree import paper_tables

TABLES = paper_tables()
SETTINGS = LadderSettings(runs=1, seed=1, is_smoke=True)
COPIES = Cell({"what": "memcpy, one thread"}, 8, (1.0,))


def result_of(**figures: Any) -> Any:
    """A result with these figures, as it is read back."""
    found = {name.removeprefix("figure_"): {"title": "a title", **made} for name, made in figures.items()}
    result = measure_ladder([], SETTINGS, COPIES, {})
    return json.loads(json.dumps({**result, "figures": found}))


@pytest.mark.bench_smoke
def test_smoke_draws_and_verifies_every_figure(tmp_path: Path) -> None:
    """CI runs the smoke; whoever reads the JSON relies on these names."""
    file, charts = tmp_path / "ladder.json", tmp_path / "charts"
    assert run(["ladder", "--smoke", "--json", str(file), "--plot", str(charts)]) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert result["machine"]["cpu_model"]
    assert "commit" in result
    assert result["settings"]["seed"] == 1
    assert set(result["figures"]) == set(FIGURES)
    for name, made in result["figures"].items():
        assert made["state"] == "done", made["reason"]
        assert (charts / f"figure-{name.lower()}.png").stat().st_size > 0
        for cell in made["cells"]:
            assert cell["sample_count"] == len(cell["samples_s"]) >= 1
            assert cell["duration_s"]["min"] <= cell["duration_s"]["median"] <= cell["duration_s"]["max"]


@pytest.mark.parametrize("column", TABLES["table_a7"], ids=lambda row: f"{row['context']}-G{row['chunk_tokens']}")
def test_element_counts_are_those_of_table_a7(column: dict[str, int | str]) -> None:
    """The server's own plan, column by column (paper, Table A7)."""
    context, chunk_tokens = str(column["context"]), int(column["chunk_tokens"])
    assert planned_elements(context, chunk_tokens, int(column["agg_payload_mib"]) * MIB) == column


def test_the_bench_compares_with_the_whole_of_table_a7() -> None:
    """The copy of the table that travels with the bench is the one the tests have."""
    assert list(table_a7()) == TABLES["table_a7"]
    assert element_counts()["state"] == "done"


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
    rows = layer_payloads()["rows"]
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
    made = figure({}, ["a note"], [Cell({"way": "preadv", "block_bytes": 64 * KIB}, 8, (1.0, 4.0, 2.0))])
    cell = made["cells"][0]
    assert cell["samples_s"] == [1.0, 4.0, 2.0]
    assert cell["throughput_bytes_per_s"] == {"median": 4.0, "min": 2.0, "max": 8.0}
    found = result_of(figure_8=made)
    text = as_text(found, show(found))
    assert "* a note" in text
    assert re.search(r"preadv +64 KiB", text)


def test_what_is_absent_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that cannot run here is no failure of the others, and never passed over in silence."""

    def lacking(_: Session) -> Any:
        raise ImportError("no module named 'tokenizers'")

    monkeypatch.setattr(ladder_run, "FIGURES", {**FIGURES, "4": ("hashing", lacking)})
    found = measure_ladder(["4", "A7"], SETTINGS, COPIES, {})
    assert [made["state"] for made in found["figures"].values()] == ["not_run", "done"]
    assert found["problem"] is None
    text = as_text(found, show(found))
    assert "NOT RUN: no module named 'tokenizers'" in text
    assert "Not run: 4" in text


@pytest.mark.slow
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
    monkeypatch.setattr(raw_store, "prefix", lambda *_, **__: [None])
    with pytest.raises(VerificationError):
        raw_store._find(tmp_path, ["key"])


def works(count: int, in_flight: int) -> Iterator[tuple[Work, Delivery]]:
    """A filled buffer in either order."""
    layout = ChunkLayout(3, 1, 32)
    keys = [f"key/{index}" for index in range(count)]
    for delivery in (Delivery.CHUNK_MAJOR, Delivery.LAYER_MAJOR):
        buffer = np.zeros(layout.delivery_bytes(count), dtype=np.uint8)
        objects = Chunks(keys, make_content(count, layout, seed=5))
        work = Work(cast(Client, None), objects, buffer, in_flight)
        work.place(delivery)
        yield work, delivery


@given(count=st.integers(1, 20), in_flight=st.integers(1, 24))
def test_what_is_laid_out_verifies_in_its_own_order_only(count: int, in_flight: int) -> None:
    """Puts are laid out as gets are compared, part by part."""
    for work, delivery in works(count, in_flight):
        work.verify(delivery)
        other = Delivery.CHUNK_MAJOR if delivery is Delivery.LAYER_MAJOR else Delivery.LAYER_MAJOR
        if len(work.parts()) < count:
            with pytest.raises(VerificationError):
                work.verify(other)


@given(at=st.integers(0, 5 * 96 - 1), in_flight=st.integers(1, 6))
def test_one_flipped_byte_is_found(at: int, in_flight: int) -> None:
    """Whatever part it is in."""
    for work, delivery in works(5, in_flight):
        work.buffer[at] ^= 1
        with pytest.raises(VerificationError):
            work.verify(delivery)


def test_a_cleared_buffer_does_not_verify() -> None:
    """Bytes of the run before must not pass for this one's."""
    for work, delivery in works(4, 2):
        work.clear()
        with pytest.raises(VerificationError):
            work.verify(delivery)


def test_the_server_s_account_is_there_and_understood() -> None:
    """A part left out would be counted as the client's."""
    check_account("gateway;dur=0.310, storage;dur=2.100, transfer;dur=5.000", "a GET")
    with pytest.raises(NotRun, match="a GET: the answer carries no"):
        check_account(None, "a GET")


@pytest.mark.parametrize("text", ["", "gateway", "gateway;dur=", "gateway;dur=-1", "gateway;dur=1;desc=x"])
def test_an_account_that_cannot_be_read_is_refused(text: str) -> None:
    """As the one that is missing."""
    with pytest.raises(VerificationError, match="not understood"):
        check_account(text, "a GET")


def test_speedups_compare_the_best_concurrency_of_each_path() -> None:
    """A path must not look good because another was run with too few requests in flight."""

    def cell(path: str, in_flight: int, seconds: float) -> Cell:
        labels: dict[str, str | int] = {
            "path": path,
            "operation": "GET",
            "block_bytes": 64 * KIB,
            "in_flight": in_flight,
        }
        return Cell(labels, 100, (seconds,))

    cells = [cell("S3RDMA Direct", 8, 4.0), cell("S3RDMA Direct", 32, 2.0), cell("S3RDMA Agg", 1, 0.5)]
    (row,) = speedups(cells)
    assert row["agg_over_direct"] == 4.0
    assert row["batch_over_direct"] is None


@pytest.mark.slow
def test_a_latency_chart_has_a_bar_for_each_case(tmp_path: Path) -> None:
    """Four parts, whatever the number of samples."""
    cells = [
        Cell({"path": path.value, "operation": "GET", "block_bytes": size, "part": part}, 0, (0.001, 0.002))
        for size in (64 * KIB, MIB)
        for path in FIVE
        for part in PARTS
    ]
    plot(result_of(figure_10=figure({}, [], cells)), tmp_path)
    assert (tmp_path / "figure-10.png").stat().st_size > 0


def test_dropped_files_are_not_resident(tmp_path: Path) -> None:
    """Cold has to be seen, not hoped for."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    fd = os.open(path, os.O_RDWR)
    try:
        assert resident_share(fd) == 1.0
        drop_pages(fd)
        assert resident_share(fd) <= raw_store.RESIDENT_SHARE_MAX
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
