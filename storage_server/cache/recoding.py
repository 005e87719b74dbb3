"""Encoding chunks, in a thread of its own that takes at most a part of one core: nobody waits for it.

The bytes are read from memory, or from where the chunk lies, encoded layer by layer, decoded again, and compared, so
that each encoded chunk carries its measured error; where they were encoded before, a bound of it.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from objectcache.kv_codecs.encoding import WrongLayerError, decode, encode
from objectcache.kv_codecs.layer import Codec
from objectcache.kv_codecs.loss import loss
from storage_server.planning.forms import Encoded, Reading

CPU_FRACTION = 0.5
"""The thread sleeps as long as it has worked."""


class Recoder:
    """One thread that encodes chunks."""

    def __init__(self, cpu_fraction: float = CPU_FRACTION) -> None:
        self._cpu_fraction = cpu_fraction
        self.threads = ThreadPoolExecutor(1, "recode")
        self.encoded_bytes = 0
        """Exact bytes that have been encoded."""
        self.busy_s = 0.0

    def encode(self, exact: memoryview, reading: Reading, codec: Codec) -> tuple[Encoded, bytes] | None:
        """Encode a chunk of L*S bytes. Runs in the thread. None for elements that no error can be told of: they are no
        numbers, or too large.
        """
        began_s = time.monotonic()
        layers = np.frombuffer(exact, dtype=np.uint8).reshape(reading.num_layers, reading.shape.nbytes)
        return self._encode(layers, reading, codec, began_s)

    def encode_further(
        self, packed: memoryview, encoded: Encoded, reading: Reading, codec: Codec
    ) -> tuple[Encoded, bytes] | None:
        """Encode a chunk of a form that `codec` goes on from. The errors that are told are bounds: by the triangle
        inequality an error is at most the one before, and ours against the bytes that are here, whose norm is at most
        (1 + before) times the exact one's. Runs in the thread. None as in `encode`, and for bytes that are damaged.
        """
        began_s = time.monotonic()
        shape = encoded.shape
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(encoded.num_layers, encoded.layer_bytes)
        layers = np.empty((encoded.num_layers, shape.nbytes), dtype=np.uint8)
        try:
            for row, layer in zip(rows, layers, strict=True):
                decode(row.tobytes(), shape, layer)
        except WrongLayerError:
            return None
        made = self._encode(layers, reading, codec, began_s)
        if made is None:
            return None
        ours, data = made
        worst, growth = encoded.worst_error, 1 + encoded.worst_error
        further = replace(
            ours,
            worst_error=worst + growth * ours.worst_error,
            mean_error=encoded.mean_error + growth * ours.mean_error,
        )
        return further, data

    def _encode(
        self, layers: npt.NDArray[np.uint8], reading: Reading, codec: Codec, began_s: float
    ) -> tuple[Encoded, bytes] | None:
        shape = reading.shape
        parts, errors = list[bytes](), list[float]()
        back = np.empty(shape.nbytes, dtype=np.uint8)
        for layer in layers:
            part = encode(layer, shape, codec)
            decode(part, shape, back)
            lost = loss(layer, back, shape)
            parts.append(part)
            errors += [lost.keys, lost.values]
        took_s = time.monotonic() - began_s
        self.busy_s += took_s
        self.encoded_bytes += layers.nbytes
        time.sleep(took_s * (1 / self._cpu_fraction - 1))
        if not all(map(math.isfinite, errors)):
            return None
        return Encoded(codec, shape, reading.num_layers, max(errors), sum(errors) / len(errors)), b"".join(parts)

    def close(self) -> None:
        """Wait for the chunk that is being encoded."""
        self.threads.shutdown()
