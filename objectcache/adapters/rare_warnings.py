"""Warnings that others cause, who may cause as many as they like."""

from __future__ import annotations

import logging
import math
import time

WARN_EVERY_S = 60.0


class RareWarnings:
    """Warnings in `log`. Each kind of warning, which its message names, is written once in WARN_EVERY_S; the rest is
    for debugging. Texts of others belong into a message by `%.300r`, which bounds them and has no line ends.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._written_s: dict[str, float] = {}

    def warn(self, message: str, *arguments: object, error: BaseException | None = None) -> None:
        """Write the warning, with the stack of an error of ours."""
        now_s = time.monotonic()
        is_due = now_s - self._written_s.get(message, -math.inf) >= WARN_EVERY_S
        if is_due:
            self._written_s[message] = now_s
        self._log.log(logging.WARNING if is_due else logging.DEBUG, message, *arguments, exc_info=error)
