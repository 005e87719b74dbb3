"""Charts of rows of a result: what is across, which line or bar a row belongs to, and its panel. Needs matplotlib (the
extra `demo`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core.show import at
from objectcache.calibration.charts import cell_ticks, chart, draw_bars, draw_line, draw_rows, shared_legend
from objectcache.calibration.charts import scaled as scaled_spreads
from objectcache.calibration.samples import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Any
"""A row of a result: a mapping."""
TICKS_UPRIGHT_MAX = 6
"""More names across a panel are turned, so that they do not cover each other."""


class Kind(Enum):
    """Points joined by lines, groups of upright bars, or one lying bar for each row."""

    LINES = "lines"
    BARS = "bars"
    LYING = "lying"


Of = str | Callable[[Row], Any]
"""Something of a row: the path of a field, or a function; "" is nothing."""


def _of(what: Of, row: Row) -> Any:
    if isinstance(what, str):
        return at(row, what) if what else ""
    return what(row)


@dataclass(frozen=True, slots=True)
class Chart:
    """How rows are drawn. `value` is a number, or a mapping with median, min and max; it is drawn times `scale`, less
    `offset` before. `row` and `column` say in which panel a row belongs. Numbers across are set apart by powers of two.
    """

    kind: Kind
    across: Of
    value: Of
    value_title: str
    series: Of = ""
    row: Of = ""
    column: Of = ""
    across_title: str = ""
    scale: float = 1.0
    offset: float = 0.0
    is_log: bool = False
    color: Callable[[Row], str] | None = None


def draw(how: Chart, rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the rows into a file whose name says its format. Without a row there is no file."""
    if not rows:
        return
    down, over, series = (
        list(dict.fromkeys(_of(what, each) for each in rows)) for what in (how.row, how.column, how.series)
    )
    panels = {(line, column): [each for each in rows if (_of(how.row, each), _of(how.column, each)) == (line, column)]
              for line in down for column in over}  # fmt: skip
    heights = [max(len(panels[line, column]) for column in over) + 1 for line in down]
    size = (10.0, 0.32 * sum(heights) + 1.5) if how.kind is Kind.LYING else (3 + 3.6 * len(over), 1 + 3.2 * len(down))
    with chart(path, title, size, len(down), len(over), height_ratios=_ratios(how, heights)) as grid:
        for line, row_axes in zip(down, grid, strict=True):
            for column, axes in zip(over, row_axes, strict=True):
                _panel(axes, how, panels[line, column], series)
                axes.set_title(", ".join(filter(None, (line, column))), fontsize=9)
                axes.set_xlabel(how.value_title if how.kind is Kind.LYING else how.across_title)
            if how.kind is not Kind.LYING:
                row_axes[0].set_ylabel(how.value_title)
        if len(series) > 1 and how.kind is not Kind.LYING:
            shared_legend(grid, "outside right center")


def _ratios(how: Chart, heights: list[int]) -> list[int] | None:
    return heights if how.kind is Kind.LYING else None


def _panel(axes: Axes, how: Chart, rows: Sequence[Row], series: Sequence[str]) -> None:
    if how.kind is Kind.LYING:
        names = [[str(_of(what, each)) for what in (how.across, how.series) if _of(what, each)] for each in rows]
        colors = None if how.color is None else [how.color(each) for each in rows]
        if len(series) > 1:
            colors = [f"C{series.index(_of(how.series, each))}" for each in rows]
        bars = draw_rows(axes, [": ".join(name) for name in names], _spreads(how, rows), color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=4, fontsize=7)
        axes.tick_params(labelsize=7)
        axes.margins(x=0.1)
        return
    ticks = sorted({_of(how.across, each) for each in rows}) if how.kind is Kind.LINES else _order(how, rows)
    present = [name for name in series if any(_of(how.series, each) == name for each in rows)]
    for place, name in enumerate(present):
        mine, color = [each for each in rows if _of(how.series, each) == name], f"C{series.index(name)}"
        if how.kind is Kind.LINES:
            draw_line(axes, [_of(how.across, each) for each in mine], _spreads(how, mine), name, color=color)
        else:
            width = 0.8 / len(present)
            at = [ticks.index(_of(how.across, each)) + width * (place - (len(present) - 1) / 2) for each in mine]
            draw_bars(axes, at, _spreads(how, mine), width, color=color, label=name)
    if how.kind is Kind.BARS:
        turned = {"rotation": 35, "ha": "right"} if len(ticks) > TICKS_UPRIGHT_MAX else {}
        cell_ticks(axes, [str(tick) for tick in ticks], fontsize=8, **turned)
    elif all(isinstance(tick, (int, float)) and tick > 0 for tick in ticks):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    if how.is_log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _order(how: Chart, rows: Sequence[Row]) -> list[Any]:
    return list(dict.fromkeys(_of(how.across, each) for each in rows))


def _spreads(how: Chart, rows: Sequence[Row]) -> list[Spread]:
    return scaled_spreads([_spread_of(_of(how.value, row)) for row in rows], how.scale, how.offset)


def _spread_of(value: Any) -> Spread:
    if isinstance(value, (int, float)):
        return Spread(value, value, value)
    return Spread(value["median"], value["min"], value["max"])
