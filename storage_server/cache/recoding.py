"""Encoding chunks, in a thread of its own that takes at most a part of one core: nobody waits for it.

The bytes are read from memory, or from where the chunk lies, encoded layer by layer, decoded again, and compared, so
that each encoded chunk carries its measured error; where they were encoded before, a bound of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from objectcache.kv_codecs.chains import shortest
from objectcache.kv_codecs.encoding import WrongLayerError, decode, encode, encode_further
from objectcache.kv_codecs.layer import Codec
from objectcache.kv_codecs.loss import Loss, loss
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
        parts = [encode(layer, reading.shape, codec) for layer in layers]
        return self._measured(parts, layers, reading, codec, began_s)

    def encode_further(
        self, packed: memoryview, encoded: Encoded, reading: Reading, codec: Codec
    ) -> tuple[Encoded, bytes] | None:
        """Encode a chunk of a form that `codec` goes on from. The errors that are told are bounds, of keys and of
        values apart: by the triangle inequality an error is at most the one before, and ours against the bytes that are
        here, whose norm is at most (1 + before) times the exact one's. Ours is 0 where keys or values keep their bits.
        Runs in the thread. None as in `encode`, and for bytes that are damaged.
        """
        began_s = time.monotonic()
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(encoded.num_layers, encoded.layer_bytes)
        parts, before = list[bytes](), np.empty((encoded.num_layers, encoded.shape.nbytes), dtype=np.uint8)
        try:
            for at, row in enumerate(rows):
                part, before[at] = encode_further(row.data, encoded.shape, codec)
                parts.append(part)
        except WrongLayerError:
            return None
        made = self._measured(parts, before, reading, codec, began_s)
        if made is None:
            return None
        ours, data = made
        former, mine = encoded.greatest_errors, ours.greatest_errors
        greatest = Loss(
            former.keys + (1 + former.keys) * mine.keys,
            former.values + (1 + former.values) * mine.values,
        )
        mean_error = encoded.mean_error + (1 + former.worst) * ours.mean_error
        told = replace(ours, worst_error=greatest.worst, mean_error=mean_error, greatest=greatest)
        return replace(told, before=shortest((*encoded.chain, codec))[:-1]), data

    def _measured(
        self, parts: Sequence[bytes], layers: npt.NDArray[np.uint8], reading: Reading, codec: Codec, began_s: float
    ) -> tuple[Encoded, bytes] | None:
        """The encoded chunk with its errors against these layers."""
        shape = reading.shape
        losses = list[Loss]()
        back = np.empty(shape.nbytes, dtype=np.uint8)
        for part, layer in zip(parts, layers, strict=True):
            decode(part, shape, back)
            losses.append(loss(layer, back, shape))
        took_s = time.monotonic() - began_s
        self.busy_s += took_s
        self.encoded_bytes += layers.nbytes
        time.sleep(took_s * (1 / self._cpu_fraction - 1))
        keys, values = [each.keys for each in losses], [each.values for each in losses]
        errors = keys + values
        if not all(map(math.isfinite, errors)):
            return None
        greatest = Loss(max(keys), max(values))
        mean_error = sum(errors) / len(errors)
        encoded = Encoded(
            codec,
            shape,
            reading.num_layers,
            worst_error=greatest.worst,
            mean_error=mean_error,
            greatest=greatest,
        )
        return encoded, b"".join(parts)

    def close(self) -> None:
        """Wait for the chunk that is being encoded."""
        self.threads.shutdown()
