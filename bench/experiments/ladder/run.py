"""`bench ladder`: its figures, each of which may lack something or fail without keeping the others from running."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from bench.beds.baselines import MemoryCopy
from bench.core.experiment import FAILURES, Experiment, published
from bench.core.options import Options, each, filled
from bench.core.show import Json
from bench.experiments.ladder.bed import LadderSettings, NotRun, Session, figure
from bench.experiments.ladder.computed import element_counts, layer_payloads
from bench.experiments.ladder.hashing import hashing
from bench.experiments.ladder.latency import latency
from bench.experiments.ladder.objects import aggregation, many_objects, single_objects
from bench.experiments.ladder.raw_store import raw_store
from bench.experiments.ladder.show import plot, show
from calibration.content import VerificationError
from calibration.samples import Cell, cell_json
from calibration.servers import LocalServerError
from descriptors.units import MIB
from nixl_client.client import Transport

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


def _declare(options: Options) -> None:
    every = tuple(FIGURES)
    text = f"default: {','.join(every)}"
    options.add("--figures", type=each(str.upper, every), default=every, metavar="LIST", help=text)
    options.runs(5)
    options.seed()
    options.choice("--transport", tuple(Transport), Transport.UCX, "of descriptor GETs")
    options.serve_options()
    options.folder()


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    settings = filled(LadderSettings, options, is_smoke=options.smoke)
    copy = MemoryCopy(16 * MIB if options.smoke else 256 * MIB)
    times_s = tuple(copy.run() for _ in range(settings.runs + 1))[1:]
    copies = Cell({"what": "memcpy, one thread"}, copy.nbytes, times_s)
    return measure_ladder(options.figures, settings, copies, origin)


LADDER = Experiment(
    name="ladder",
    help="the paper's figures 2, 4, 8, 9, 10, 11 and A8 and table A7, on this machine",
    description="From the raw store up to aggregated layers: each figure with its bytes checked, raw samples, median "
    "and extremes.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
    charts="DIR",
)
