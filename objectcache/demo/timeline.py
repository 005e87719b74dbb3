"""The picture: what each layer's transfer and compute did, layer by layer and with the whole payload first."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from objectcache.demo.measure import ModelAnswer

REQUEST, TRANSFER, COMPUTE, STALL = "#9aa0a6", "#2f6db5", "#3a9d5d", "#e8483b"
BAR_HEIGHT = 0.4
BUNCH_S = 1e-3
LABELS = {
    TRANSFER: "transfer (from the notice before to the layer's own)",
    COMPUTE: "compute",
    STALL: "stall: the model waits for this layer",
    REQUEST: "lookup and request",
}


def draw(path: Path, layer_major: ModelAnswer, chunk_major: ModelAnswer, eq3_ttft_s: float, title: str) -> None:
    """Write a PNG: layer-major above, with what Eq. 3 predicts, chunk-major below, on one time axis."""
    layers = len(layer_major.waits)
    figure, panels = plt.subplots(2, 1, sharex=True, figsize=(12, 2.4 + min(0.5 * layers, 9.0)), layout="constrained")
    _panel(panels[0], "layer-major: the next layers travel while a layer computes", layer_major, _one_after_another)
    _panel(panels[1], "chunk-major: everything travels, then everything computes", chunk_major, _all_together)
    panels[0].axvline(1e3 * eq3_ttft_s, color="#555555", linewidth=1.2, linestyle=":", label="Eq. 3 predicts")
    panels[0].legend(loc="lower left", frameon=False)
    panels[1].set_xlabel("time since the lookup began [ms]")
    panels[0].set_xlim(0, 1.03e3 * max(layer_major.ttft_s, chunk_major.ttft_s))
    figure.suptitle(title, fontsize=13)
    handles = [Patch(color=color, label=label) for color, label in LABELS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _one_after_another(answer: ModelAnswer) -> list[tuple[float, float]]:
    """(start, end) of each layer's transfer: since the notice before. Notices overtake each other and come in bunches;
    layers of one bunch share the time since the one before.
    """
    ready = [wait.ready_at_s for wait in answer.waits]
    edges = [answer.lookup_ended_s, *ready]
    return [(max(edge for edge in edges if edge <= max(end - BUNCH_S, edges[0])), end) for end in ready]


def _all_together(answer: ModelAnswer) -> list[tuple[float, float]]:
    """(start, end) of each layer's transfer: every chunk brings a piece of every layer."""
    return [(answer.lookup_ended_s, wait.ready_at_s) for wait in answer.waits]


def _panel(axes: Axes, title: str, answer: ModelAnswer, transfers) -> None:  # type: ignore[no-untyped-def]
    def bar(layer_index: int, start_s: float, end_s: float, color: str) -> None:
        """Transfers in the upper half of a layer's row, everything else in the lower."""
        y = layer_index - (BAR_HEIGHT / 2 if color == TRANSFER else -BAR_HEIGHT / 2)
        left_ms, width_ms = 1e3 * (start_s - answer.started_s), 1e3 * (end_s - start_s)
        axes.barh(y, width_ms, BAR_HEIGHT, left_ms, color=color, edgecolor="white", linewidth=0.4)

    for layer_index, (start_s, end_s) in enumerate(transfers(answer)):
        bar(layer_index, start_s, end_s, TRANSFER)
    bar(0, answer.started_s, answer.forward_started_s, REQUEST)
    begins = [answer.forward_started_s, *(span.began_s for span in answer.spans[1:])]
    ends = [*(span.ended_s for span in answer.spans[:-1]), answer.finished_s]
    for layer_index, (begin_s, wait, end_s) in enumerate(zip(begins, answer.waits, ends, strict=True)):
        bar(layer_index, begin_s, wait.started_s, COMPUTE)
        bar(layer_index, wait.started_s, wait.ended_s, STALL)
        bar(layer_index, wait.ended_s, end_s, COMPUTE)
    _mark_ttft(axes, answer)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel("layer")
    axes.set_yticks(range(0, len(answer.waits), 1 + len(answer.waits) // 20))
    axes.invert_yaxis()
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _mark_ttft(axes: Axes, answer: ModelAnswer) -> None:
    ttft_ms = 1e3 * answer.ttft_s
    axes.axvline(ttft_ms, color="black", linewidth=1, linestyle="--")
    text = f"TTFT {ttft_ms:.0f} ms, {1e3 * answer.stall_s:.0f} ms of it stalled"
    axes.annotate(
        text,
        (ttft_ms, 0),
        (-8, 0),
        textcoords="offset points",
        va="center",
        ha="right",
        fontsize=11,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
