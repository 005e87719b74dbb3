"""The few shapes of which all charts are made. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from objectcache.calibration.samples import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 120


@contextmanager
def chart(
    path: Path, title: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[Any]:
    """Panels to draw in, an array of shape (rows, columns); the file is written when the block ends. `options` are
    further ones of matplotlib's `subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(max(1, rows), max(1, columns), squeeze=False, **options)
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def whiskers(spreads: Sequence[Spread]) -> list[list[float]]:
    """From the medians to the least and to the greatest."""
    return [[each.median - each.min for each in spreads], [each.max - each.median for each in spreads]]


def scaled(spreads: Sequence[Spread], scale: float, offset: float = 0.0) -> list[Spread]:
    """In another unit."""
    return [Spread(*((scale * (value - offset)) for value in (each.median, each.min, each.max))) for each in spreads]


def draw_line(axes: Axes, at: Sequence[float], spreads: Sequence[Spread], label: str, **style: Any) -> None:
    """Medians with whiskers, joined."""
    options = {"marker": "o", "capsize": 3, **style}
    axes.errorbar(at, [each.median for each in spreads], whiskers(spreads), label=label, **options)


def draw_bars(axes: Axes, at: Sequence[Any], spreads: Sequence[Spread], width: float = 0.8, **style: Any) -> Any:
    """Medians with whiskers, upright."""
    return axes.bar(at, [each.median for each in spreads], width, yerr=whiskers(spreads), capsize=2, **style)


def draw_rows(axes: Axes, names: Sequence[str], spreads: Sequence[Spread], **style: Any) -> Any:
    """Medians with whiskers, lying, the first one on top."""
    bars = axes.barh(names, [each.median for each in spreads], xerr=whiskers(spreads), capsize=2, **style)
    axes.invert_yaxis()
    return bars


def shared_legend(panels: Any, where: str = "outside right upper") -> None:
    """One legend for all panels, each label once."""
    handles: dict[str, Any] = {}
    for axes in panels.flat:
        found, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    panels.flat[0].figure.legend(handles.values(), handles.keys(), loc=where, fontsize=8)


def cell_ticks(axes: Axes, names: Sequence[str], **style: Any) -> None:
    """A name for each place from 0 on."""
    axes.set_xticks(list(range(len(names))), list(names), **style)
