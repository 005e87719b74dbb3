"""`bench ladder`: its figures, each of which may lack something or fail without keeping the others from running; and
how they are shown and drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.beds.baselines import MemoryCopy
from bench.core.experiment import FAILURES, Experiment, published
from bench.core.plots import Chart, Kind, Of, draw
from bench.core.show import Column, Json, Section, Table, gbps, ms, size, table, written
from bench.paper.ladder.bed import LadderSettings, NotRun, Session, figure
from bench.paper.ladder.computed import element_counts, layer_payloads
from bench.paper.ladder.hashing import hashing
from bench.paper.ladder.moves import aggregation, latency, many_objects, single_objects
from bench.paper.ladder.raw_store import raw_store
from bench.paper.tables import MODELS
from descriptors.units import KIB, MIB, format_bytes
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import Cell, cell_json
from objectcache.calibration.servers import LocalServerError

MEASURED = ("nbytes", "sample_count", "duration_s", "throughput_bytes_per_s", "samples_s")
"""The fields of a cell that are measured; its others say what the cell is of."""
RATE, TIME = "throughput_bytes_per_s", "duration_s"


def show(result: Json) -> dict[str, Section]:
    """Every figure; 64 KiB slices by the five paths; what one thread copies, and what was not run."""
    figures = result["figures"]
    copied = f"One thread copies memory at {written(result['memcpy'][RATE], gbps)} GB/s here."
    left_out = ", ".join(name for name, one in figures.items() if one["state"] == "not_run")
    sections = {f"figure-{name}": _figure(name, figure) for name, figure in figures.items()}
    if "11" in figures and figures["11"]["cells"]:
        sections["ladder"] = _slices(figures["11"]["cells"])
    return {**sections, "remarks": (copied, f"Not run: {left_out or 'none'}")}


def _heading(name: str, figure: Json) -> str:
    return f"{'Table' if name == 'A7' else 'Figure'} {name}: {figure['title']}"


def _figure(name: str, figure: Json) -> Section:
    state = figure["state"].upper().replace("_", " ")
    said = [f"{state}: {figure['reason']}"] if figure["state"] != "done" else []
    head = "\n".join([_heading(name, figure), *said, *(f"* {note}" for note in figure["notes"])])
    return head, *(_table(rows) for rows in (figure["cells"], figure["rows"]) if rows)


def _table(rows: Sequence[Json]) -> Table:
    first = rows[0]
    columns = [Column(name, name, size if name.endswith("_bytes") else None) for name in first if name not in MEASURED]
    if TIME in first:
        columns.append(Column("GB/s", RATE, gbps) if RATE in first else Column("ms", TIME, ms))
        columns.append(Column("samples", "sample_count"))
    return table(rows, *columns)


def _slices(cells: Sequence[Json]) -> Section:
    shown = [cell for cell in cells if cell["operation"] == "GET" and cell["block_bytes"] == 64 * KIB]
    made = table(shown, "GET, 64 KiB slices = path | in flight = in_flight | GB/s = throughput_bytes_per_s:GB/s")
    return made, f"Samples of a cell: {min(cell['sample_count'] for cell in shown)}."


FAMILIES = list(dict.fromkeys(model.family for model in MODELS))
COLORS = 10


def plot(result: Json, folder: Path) -> None:
    """A chart for each figure that was done."""
    for name, made in result["figures"].items():
        if made["state"] == "done":
            counts = sorted({cell["sample_count"] for cell in made["cells"]})
            samples = f" ({'-'.join(map(str, counts))} samples, median and extremes)" if counts else ""
            how, rows_of = CHARTS[name]
            draw(how, rows_of(made), _heading(name, made) + samples, folder / f"figure-{name.lower()}.png")


def _hashing(figure: Json) -> list[Json]:
    """Tokenization stands beside hashing alone and beside hashing with lookup."""
    panels = ("hash", "hash and lookup")
    return [
        {**cell, "panel": panel} for panel in panels for cell in figure["cells"] if cell["what"] in ("tokenize", panel)
    ]


def _payloads(figure: Json) -> list[Json]:
    baseline = {"model": "8 KV heads of 128 dimensions", "payload_bytes": figure["settings"]["baseline_bytes"]}
    return [baseline, *figure["rows"]]


def _family_color(row: Json) -> str:
    return f"C{FAMILIES.index(row['family']) % COLORS}" if "family" in row else "black"


def _elements(figure: Json) -> list[Json]:
    kinds = (("slices", "original_elements"), ("payloads", "elements_after"))
    return [{**row, "kind": kind, "count": row[column]} for row in figure["rows"] for kind, column in kinds]


def _rates(across: Of, title: str, series: Of, **panels: Any) -> Chart:
    return Chart(Kind.LINES, across, RATE, "GB/s", series, across_title=title, scale=1e-9, **panels)


def _over_blocks(series: str, row: str, what: str) -> Chart:
    panels = {"row": row, "column": lambda cell: f"C={cell['in_flight']}"}
    return _rates(lambda cell: cell["block_bytes"] / KIB, f"{what} size, KiB", series, **panels)


PAYLOADS = Chart(
    Kind.LYING, "model", "payload_bytes", "KiB a layer; one colour for each family", scale=1 / KIB, color=_family_color
)
HASHING = Chart(
    Kind.LINES,
    "tokens",
    TIME,
    "ms",
    lambda cell: f"G={cell['chunk_tokens']}" if cell["chunk_tokens"] else cell["what"],
    column="panel",
    across_title="tokens",
    scale=1e3,
    is_log=True,
)
LATENCY = Chart(
    Kind.BARS,
    lambda cell: f"{cell['path'].removeprefix('S3RDMA ')}\n{cell['operation']}",
    TIME,
    "ms",
    "part",
    row=lambda cell: format_bytes(cell["block_bytes"]),
    scale=1e3,
)
AGGREGATION = _rates("chunk_tokens", "tokens of a chunk (G)", lambda cell: format_bytes(cell["aggregation_bytes"]))
ELEMENTS = Chart(
    Kind.BARS,
    lambda row: f"{row['context']}, G={row['chunk_tokens']}\n{row['agg_payload_mib']} MiB",
    "count",
    "elements the client sees",
    "kind",
    is_log=True,
)
CELLS = itemgetter("cells")
CHARTS: Mapping[str, tuple[Chart, Callable[[Json], Sequence[Any]]]] = {
    "2": (PAYLOADS, _payloads),
    "4": (HASHING, _hashing),
    "8": (_over_blocks("way", "state", "block"), CELLS),
    "9": (_over_blocks("path", "operation", "object"), CELLS),
    "10": (LATENCY, CELLS),
    "11": (_over_blocks("path", "operation", "slice"), CELLS),
    "A8": (AGGREGATION, CELLS),
    "A7": (ELEMENTS, _elements),
}


Make = Callable[[Session], Json]
FIGURES: Mapping[str, tuple[str, Make]] = {
    "2": ("layer payload of a 16-token chunk", lambda _: layer_payloads()),
    "4": ("hashing and lookup beside tokenization", hashing),
    "8": ("raw store: segment files below S3", raw_store),
    "9": ("one object a request: S3TCP, S3RDMA Buffer, S3RDMA Direct", single_objects),
    "10": ("latency of one request, by its parts", latency),
    "11": ("many objects: five paths over slice sizes", many_objects),
    "A8": ("aggregated layers over aggregation and chunk sizes", aggregation),
    "A7": ("client-visible elements with bounded aggregation", lambda _: element_counts()),
}
"""Titles and makers, by the paper's numbers of what can be measured or computed here."""


def measure_ladder(
    names: Sequence[str], settings: LadderSettings, copies: Cell, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures, one after the other. `problem` is what went wrong first, or that the server which the figures shared
    did not end well. `copies` is what one thread copies: no path can be expected to beat it for long.
    """
    figures: dict[str, Json] = {}
    server_problem = None
    try:
        with ExitStack() as stack:
            session = Session(settings, stack)
            for name in names:
                title, make = FIGURES[name]
                figures[name] = {"title": title, **_made(make, session)}
    except LocalServerError as error:
        server_problem = str(error)
    failed = (f"figure {name}: {made['reason']}" for name, made in figures.items() if made["state"] == "failed")
    problem = next(failed, server_problem)
    return published("ladder", origin, settings, problem, figures=figures, memcpy=cell_json(copies))


def _made(make: Make, session: Session) -> Json:
    try:
        return make(session)
    except (ImportError, NotRun) as error:
        return {**figure({}, ()), "state": "not_run", "reason": str(error)}
    except VerificationError as error:
        return figure({}, (), problem=f"WRONG BYTES: {error}")
    except FAILURES as error:
        return figure({}, (), problem=str(error) or type(error).__name__)


def _measure(settings: LadderSettings, origin: Mapping[str, Any]) -> Json:
    copy = MemoryCopy(16 * MIB if settings.is_smoke else 256 * MIB)
    times_s = tuple(copy.run() for _ in range(settings.runs + 1))[1:]
    copies = Cell({"what": "memcpy, one thread"}, copy.nbytes, times_s)
    return measure_ladder(settings.figures, settings, copies, origin)


LADDER = Experiment(
    name="ladder",
    help="the paper's figures 2, 4, 8, 9, 10, 11 and A8 and table A7, on this machine",
    description="Compare this machine with the paper, step by step. From the raw store up to aggregated layers: each "
    "figure with its bytes checked, raw samples, median and extremes.",
    settings=LadderSettings,
    measure=_measure,
    show=show,
    plot=plot,
    charts="DIR",
)
