"""How much loss an access key gets, whatever its readers accept: a bound for each chunk, and a quality budget for the
mean. Pure.

A bound on each chunk's error or loss (`max_error`, `max_loss`) says nothing of how many chunks are encoded. A budget
does: while the mean error of the key's last chunks, exact ones counted as 0, is above it, its readers get exact chunks
only.

    error_budget 0.02;  a third of the chunks came at 4 bits, with an error of 0.07   ->  0.023: exact ones from here on
"""

from __future__ import annotations

from collections.abc import Mapping

from storage_server.planning.forms import Bounded

HALF_LIFE_CHUNKS = 8192
"""A chunk counts half after so many others."""
COUNT_MIN = 512
"""A mean of fewer chunks is taken over so many, so that a key's first delivery does not spend the budget."""


class ErrorBudget:
    """The budget of one access key: `mean_error_max`, not negative."""

    def __init__(self, mean_error_max: float) -> None:
        self._mean_error_max = mean_error_max
        self._count = 0.0
        self._error_sum = 0.0

    @property
    def mean_error(self) -> float:
        """The mean error of the last chunks."""
        return self._error_sum / max(self._count, COUNT_MIN)

    @property
    def is_spent(self) -> bool:
        """Whether the key gets exact chunks only."""
        return self.mean_error >= self._mean_error_max

    def note(self, chunk_count: int, mean_error: float) -> None:
        """So many chunks are delivered, with this mean error."""
        kept = 2.0 ** (-chunk_count / HALF_LIFE_CHUNKS)
        self._count = self._count * kept + chunk_count
        self._error_sum = self._error_sum * kept + chunk_count * mean_error


class ErrorLimits:
    """The limits of all access keys that have some: the greatest error and the greatest loss of a chunk, and the mean
    error.
    """

    def __init__(
        self, max_errors: Mapping[str, float], error_budgets: Mapping[str, float], max_losses: Mapping[str, float]
    ) -> None:
        self._max_errors, self._max_losses = max_errors, max_losses
        self._budgets = {access_key: ErrorBudget(mean) for access_key, mean in error_budgets.items()}

    def limited(self, access_key: str, reading: Bounded | None) -> Bounded | None:
        """The reading within the key's limits; None where it gets exact chunks only."""
        budget = self._budgets.get(access_key)
        if reading is None or (budget is not None and budget.is_spent):
            return None
        max_error, max_loss = self._max_errors.get(access_key), self._max_losses.get(access_key)
        return reading if max_error is max_loss is None else reading.bounded(max_error, max_loss)

    def note(self, access_key: str, chunk_count: int, mean_error: float) -> None:
        """Chunks go to a reader of this key."""
        budget = self._budgets.get(access_key)
        if budget is not None:
            budget.note(chunk_count, mean_error)
