"""The state of the delivery of one fetch: which layers are complete, whatever order the notices take. Pure; locks are
the caller's.

A notice proves the bytes of its own writer and nothing else. A layer is complete when every writer has reported it.
Duplicates change nothing. Where a notice is missing, the writer's `done` takes its place, which a server sends only
after all its writes, or the answer to the request, which comes after every `done`. (On the wire a writer is called a
`part`.)

Encoded layers are shorter than exact ones. A layer that is shorter waits for the forms of the chunks, which say how
long it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from descriptors.headers import CHUNKS_HEADER, EPOCH_HEADER, MODE_HEADER, RATE_HEADER
from descriptors.layer_forms import LayerForms
from descriptors.layout import ChunkLayout
from descriptors.notices import Admitted, Done, Failed, Forms, LayerReady, Mode, Notice
from descriptors.storage_api import Grant


class ProtocolViolationError(ServerError):
    """The server's messages contradict each other, or the request: the bytes must not be used."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INTERNAL_ERROR, message)


class DeliveryState:
    """State of one request of `chunk_count_min` to `chunk_count_max` chunks. `chunk_count` and `mode` are None until
    known. With `check_forms` the request accepts encoded layers: it returns the forms, or raises
    ProtocolViolationError.
    """

    def __init__(
        self,
        request_id: str,
        layout: ChunkLayout,
        chunk_count_max: int,
        check_forms: Callable[[LayerForms, int], LayerForms] | None = None,
        *,
        chunk_count_min: int = 1,
    ) -> None:
        self._chunk_count_min = chunk_count_min
        self._check_forms = check_forms
        self._told_forms: LayerForms | None = None
        self.request_id = request_id
        self.layout = layout
        self.chunk_count: int | None = None
        self.mode: Mode | None = None
        self.grant = Grant()
        """The rate and epoch that the server gave when it admitted the request."""
        self.failure: ObjectCacheError | None = None
        self.is_complete = False
        self._chunk_count_max = chunk_count_max
        self._parts: int | None = None
        self._reported: dict[int, dict[int, int]] = {}
        self._done: dict[int, int] = {}
        self._ready: set[int] = set()
        self._untold: list[int] = []

    def is_ready(self, layer_index: int) -> bool:
        """Whether every byte of the layer is in the buffer."""
        return layer_index in self._ready

    @property
    def ready_count(self) -> int:
        """How many layers are complete."""
        return len(self._ready)

    def take_ready(self) -> list[int]:
        """The layers that have become complete since the last call."""
        found, self._untold = self._untold, []
        return found

    def apply(self, notice: Notice) -> None:
        """Enter one notice. Raises ProtocolViolationError when it contradicts what is known."""
        if notice.request_id != self.request_id:
            raise ProtocolViolationError(f"a notice for {notice.request_id}")
        if self._parts is None:
            self._parts = notice.parts
        elif self._parts != notice.parts:
            raise ProtocolViolationError(f"{notice.parts} parts, {self._parts} before")
        match notice:
            case Admitted():
                self.start(notice.mode, notice.chunk_count, Grant(notice.rate_bytes_per_s, notice.epoch))
            case Forms():
                self.set_forms(notice.forms)
            case LayerReady():
                self._enter_layer(notice)
            case Done():
                self._enter_done(notice)
            case Failed():
                self.fail(
                    ChunkUnavailable(
                        ErrorCode.CHUNK_CORRUPT,
                        f"chunk {notice.chunk_index} could not be read",
                        index=notice.chunk_index,
                        layer=notice.layer_index,
                    )
                )

    def answer(self, mode: Mode, chunk_count: int) -> None:
        """The request was answered with success: every part is done, every layer there."""
        self.set_shape(mode, chunk_count)
        self._complete()

    @property
    def forms(self) -> LayerForms | None:
        """The forms of the chunks; None where all are exact, as far as known."""
        return None if self.chunk_count is None else self._told_forms

    def set_forms(self, forms: LayerForms) -> None:
        """The forms as the server says them; saying them again must say the same."""
        if self._check_forms is None or self._told_forms not in (None, forms):
            raise ProtocolViolationError("forms were told that were not asked for, or others than before")
        self._told_forms = forms
        if self.chunk_count is not None:
            self._settle_all()

    def fail(self, error: ObjectCacheError) -> None:
        """No further layer will come; the ready ones stay good."""
        if self.failure is None and not self.is_complete:
            self.failure = error

    def start(self, mode: Mode, chunk_count: int, grant: Grant) -> None:
        """The request was admitted."""
        self.set_shape(mode, chunk_count)
        self.grant = grant

    def mark_ready(self, layer_index: int) -> None:
        """The layer was read to its end by ourselves; no notice is needed."""
        if layer_index not in self._ready:
            self._ready.add(layer_index)
            self._untold.append(layer_index)

    def _complete(self) -> None:
        self.is_complete = True
        for layer_index in range(self.layout.num_layers):
            self.mark_ready(layer_index)

    def set_shape(self, mode: Mode, chunk_count: int) -> None:
        """Mode and k as the server says them; saying them again must say the same."""
        if not self._chunk_count_min <= chunk_count <= self._chunk_count_max:
            raise ProtocolViolationError(f"{chunk_count} chunks of {self._chunk_count_max} asked for")
        if (self.mode or mode) is not mode or (self.chunk_count or chunk_count) != chunk_count:
            raise ProtocolViolationError(
                f"{mode.value} of {chunk_count} chunks, {self.mode} of {self.chunk_count} before"
            )
        self.mode, self.chunk_count = mode, chunk_count
        self._settle_all()

    def _settle_all(self) -> None:
        if self._told_forms is not None and self._check_forms is not None and self.chunk_count is not None:
            self._told_forms = self._check_forms(self._told_forms, self.chunk_count)
        for layer_index in list(self._reported):
            self._settle_layer(layer_index)
        self._settle_done()

    def _is_whole(self, what: str, nbytes: int, layer_count: int, chunk_count: int) -> bool:
        """Whether so many bytes are all of so many layers. Raises ProtocolViolationError where they cannot be."""
        wanted = layer_count * self.layout.layer_bytes(chunk_count)
        if self._told_forms is not None:
            wanted = layer_count * int(self._told_forms.layer_bytes.sum())
        elif self._check_forms is not None and nbytes < wanted:
            return False
        if nbytes != wanted:
            raise ProtocolViolationError(f"{what} {nbytes} bytes, {wanted} expected")
        return True

    def _enter_layer(self, notice: LayerReady) -> None:
        if notice.layer_index >= self.layout.num_layers:
            raise ProtocolViolationError(f"layer {notice.layer_index} of {self.layout.num_layers}")
        parts = self._reported.setdefault(notice.layer_index, {})
        if parts.setdefault(notice.part, notice.nbytes) != notice.nbytes:
            raise ProtocolViolationError(f"layer {notice.layer_index} reported twice with different sizes")
        self._settle_layer(notice.layer_index)

    def _enter_done(self, notice: Done) -> None:
        if self._done.setdefault(notice.part, notice.nbytes) != notice.nbytes:
            raise ProtocolViolationError(f"part {notice.part} done twice with different sizes")
        self._settle_done()

    def _settle_layer(self, layer_index: int) -> None:
        """Layers wait for `admitted` (or the answer): until k is known, their size cannot be checked."""
        parts = self._reported[layer_index]
        if self.chunk_count is None or len(parts) != self._parts:
            return
        if self._is_whole(f"layer {layer_index}:", sum(parts.values()), 1, self.chunk_count):
            self.mark_ready(layer_index)

    def _settle_done(self) -> None:
        if self.chunk_count is None or len(self._done) != self._parts or self.failure is not None:
            return
        if self._is_whole("done with", sum(self._done.values()), self.layout.num_layers, self.chunk_count):
            self._complete()


def granted_rate(headers: Mapping[str, str]) -> Grant:
    """Rate and epoch; none of them where the server does not pace."""
    rate, epoch = headers.get(RATE_HEADER, "0"), headers.get(EPOCH_HEADER, "0")
    if not (rate.isdecimal() and epoch.isdecimal()):
        raise ProtocolViolationError(f"rate {rate!r} and epoch {epoch!r} are no numbers")
    return Grant(int(rate), int(epoch))


def payload_shape(headers: Mapping[str, str]) -> tuple[Mode, int]:
    """Mode and k. Raises ProtocolViolationError when they are not there."""
    try:
        return Mode(headers[MODE_HEADER]), int(headers[CHUNKS_HEADER])
    except (KeyError, ValueError) as error:
        raise ProtocolViolationError(f"the answer does not say mode and chunks: {error}") from error
