"""Carrying out the chosen figures; what one of them lacks does not keep the others from running."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from adapters.nixl_agent import NixlFailure
from bench.child import BaselineError
from bench.content import VerificationError
from bench.ladder.aggregation import TITLE as AGGREGATION_TITLE
from bench.ladder.aggregation import aggregation
from bench.ladder.bed import LadderSettings, Session
from bench.ladder.elements import TITLE as ELEMENTS_TITLE
from bench.ladder.elements import element_counts
from bench.ladder.hashing import TITLE as HASHING_TITLE
from bench.ladder.hashing import hashing
from bench.ladder.latency import TITLE as LATENCY_TITLE
from bench.ladder.latency import latency
from bench.ladder.many_objects import TITLE as MANY_OBJECTS_TITLE
from bench.ladder.many_objects import many_objects
from bench.ladder.payloads import TITLE as PAYLOADS_TITLE
from bench.ladder.payloads import layer_payloads
from bench.ladder.raw_store import TITLE as RAW_STORE_TITLE
from bench.ladder.raw_store import raw_store
from bench.ladder.results import Figure, FigureName, State
from bench.ladder.single_objects import TITLE as SINGLE_OBJECTS_TITLE
from bench.ladder.single_objects import single_objects
from bench.server import BenchServerError
from descriptors.errors import ObjectCacheError


@dataclass(frozen=True, slots=True)
class Plan:
    """How a figure is made."""

    title: str
    make: Callable[[Session], Figure]


PLANS: Mapping[FigureName, Plan] = {
    FigureName.LAYER_PAYLOAD: Plan(PAYLOADS_TITLE, lambda _: layer_payloads()),
    FigureName.ELEMENTS: Plan(ELEMENTS_TITLE, lambda _: element_counts()),
    FigureName.HASHING: Plan(HASHING_TITLE, hashing),
    FigureName.RAW_STORE: Plan(RAW_STORE_TITLE, raw_store),
    FigureName.SINGLE_OBJECTS: Plan(SINGLE_OBJECTS_TITLE, single_objects),
    FigureName.LATENCY: Plan(LATENCY_TITLE, latency),
    FigureName.MANY_OBJECTS: Plan(MANY_OBJECTS_TITLE, many_objects),
    FigureName.AGGREGATION: Plan(AGGREGATION_TITLE, aggregation),
}


@dataclass(frozen=True, slots=True)
class LadderReport:
    """All figures of one run. `origin` is commit and machine, as they were when it started; `server_problem` says when
    the server they shared did not end well.
    """

    origin: Mapping[str, Any]
    settings: LadderSettings
    figures: Sequence[Figure]
    server_problem: str | None = None

    @property
    def problem(self) -> str | None:
        """What went wrong first; None when every figure that ran is right."""
        failed = (figure for figure in self.figures if figure.state is State.FAILED)
        return next((f"figure {figure.name.value}: {figure.reason}" for figure in failed), self.server_problem)


def run_figures(
    names: Sequence[FigureName], settings: LadderSettings, origin: Mapping[str, Any], show: Callable[[Figure], None]
) -> LadderReport:
    """Make the figures one after the other, and show each when it is there."""
    figures: list[Figure] = []
    server_problem = None
    try:
        with ExitStack() as stack:
            session = Session(settings, stack)
            for name in names:
                figures.append(_make(name, session))
                show(figures[-1])
    except BenchServerError as error:
        server_problem = str(error)
    return LadderReport(origin, settings, figures, server_problem)


def _make(name: FigureName, session: Session) -> Figure:
    plan = PLANS[name]
    try:
        return plan.make(session)
    except ImportError as error:
        return Figure(name, plan.title, State.NOT_RUN, reason=str(error))
    except VerificationError as error:
        return Figure(name, plan.title, State.FAILED, reason=f"WRONG BYTES: {error}")
    except (BaselineError, BenchServerError, ObjectCacheError, NixlFailure, TimeoutError, OSError) as error:
        return Figure(name, plan.title, State.FAILED, reason=str(error))
