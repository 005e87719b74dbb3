"""The curve of bytes against loss. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from objectcache.calibration.charts import chart
from objectcache.calibration.form_losses import FormLoss, on_curve

KL_MIN = 1e-6
"""The axis has a logarithmic scale: less is drawn here."""


def draw_losses(losses: Sequence[FormLoss], path: Path, title: str) -> None:
    """Each form with the interval of its KL, and a line through those that no other one beats."""
    curve = on_curve(losses)
    encoded = [each for each in losses if each.bytes_part < 1]
    with chart(path, title, (7.0, 4.5)) as panels:
        axes = panels[0, 0]
        for each in encoded:
            kl = each.interval("kl")
            mean, low, high = (max(KL_MIN, value) for value in (kl.mean, kl.low, min(kl.high, 100.0)))
            color = "tab:blue" if each.codec in curve else "tab:gray"
            axes.errorbar([each.bytes_part], [mean], [[mean - low], [high - mean]], marker="o", capsize=3, color=color)
            axes.annotate(each.codec, (each.bytes_part, mean), xytext=(6, 4), textcoords="offset points", fontsize=8)
        line = sorted((each.bytes_part, max(KL_MIN, each.kl)) for each in encoded if each.codec in curve)
        axes.plot([part for part, _ in line], [kl for _, kl in line], color="tab:blue", linewidth=1)
        axes.set_yscale("log")
        axes.set_xlabel("bytes, part of the exact ones")
        axes.set_ylabel("KL a token, nats")
