"""The log's word on readers with a bound of the loss whose model is not calibrated: such readers get exact chunks, and
nobody else says why. It is said once for each model and layout.
"""

from __future__ import annotations

import logging

from objectcache.kv_codecs.layer import LayerShape
from storage_server.planning.forms import Reading
from storage_server.planning.losses import ChunksModel

NOTES_MAX = 256
_log = logging.getLogger(__name__)


class UncalibratedNotes:
    """The models and layouts that were told, NOTES_MAX at most: keys, which clients choose, name models."""

    def __init__(self) -> None:
        self._told: set[tuple[ChunksModel, LayerShape, int]] = set()

    def note(self, reading: Reading) -> None:
        """A reader with a bound got exact chunks, or might have had more encoded ones."""
        losses = reading.losses
        if losses is None or losses.max_loss is None or len(self._told) >= NOTES_MAX:
            return
        name = losses.model, reading.shape, reading.num_layers
        problem = losses.table.problem(*name)
        if problem is not None and name not in self._told:
            self._told.add(name)
            _log.warning("readers with max_loss in bucket %s have no calibration: %s", reading.bucket, problem)
