"""Plain GETs of chunks that the server has encoded, decoded here for clients that cannot: layer by layer, as the bytes
come from the store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import numpy as np

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.headers import CODEC_HEADER, DECODE_HEADER
from descriptors.kv_forms import EncodedForm
from descriptors.objects import ReadRequest
from descriptors.storage_api import ObjectRead
from gateway.call import Call
from objectcache.adapters.threads import computed
from objectcache.kv_codecs.elements import Bytes, Element
from objectcache.kv_codecs.encoding import WrongLayerError, decode, encoded_bytes_max
from objectcache.kv_codecs.layer import Codec, LayerShape

HERE_BYTES_MAX = 64 << 10
"""Larger layers are decoded in a thread."""


class DecodedBody:
    """The exact-sized bytes of an encoded chunk: `nbytes` of them. Raises ServerError(InternalError) for a form that is
    not known here, as of a later release.
    """

    def __init__(self, call: Call, read: ObjectRead) -> None:
        self._call = call
        self._read = read
        headers = read.head.info.attributes.headers
        try:
            form = EncodedForm.parse(headers[CODEC_HEADER])
            self._codec = Codec(form.codec)
            self._shape = LayerShape(form.layout.tokens, form.layout.width, Element[form.layout.element.upper()])
        except (KeyError, ValueError):
            raise ServerError(ErrorCode.INTERNAL_ERROR, "the form of this chunk is not known here") from None
        self._layer_bytes = encoded_bytes_max(self._codec, self._shape)
        if read.head.info.nbytes != form.layout.num_layers * self._layer_bytes:
            raise ServerError(ErrorCode.INTERNAL_ERROR, "the chunk does not have the bytes of its form")
        self.nbytes = form.layout.nbytes

    async def layers(self) -> AsyncGenerator[memoryview, None]:
        """Each layer. Its memory counts among the caller's documents, and is used again for the next one. Raises
        ServerError: SlowDown; InternalError for a layer that is damaged.
        """
        held_bytes = self._shape.nbytes + self._layer_bytes
        documents, access_key = self._call.documents, self._call.access_key
        documents.take(access_key, held_bytes)
        try:
            out, coming = np.empty(self._shape.nbytes, dtype=np.uint8), bytearray()
            read_bytes = 0
            async for piece in self._read.body:
                view = memoryview(piece)
                read_bytes += len(view)
                while view:
                    part = view[: self._layer_bytes - len(coming)]
                    coming += part
                    view = view[len(part) :]
                    if len(coming) == self._layer_bytes:
                        await computed(partial(self._decode, coming, out), is_long=len(out) > HERE_BYTES_MAX)
                        yield out.data
                        coming.clear()
            self._read.require_whole(read_bytes)
        finally:
            documents.give_back(access_key, held_bytes)

    def _decode(self, layer: bytearray, out: Bytes) -> None:
        try:
            codec = decode(bytes(layer), self._shape, out)
        except WrongLayerError as error:
            raise ServerError(ErrorCode.INTERNAL_ERROR, "a layer of the encoded chunk is damaged") from error
        if codec is not self._codec:
            raise ServerError(ErrorCode.INTERNAL_ERROR, "a layer has another codec than its chunk")


def wants_decoded(call: Call, request: ReadRequest) -> bool:
    """Whether the client asks for decoded bytes. Raises CallerError: InvalidArgument; NotImplemented with a range."""
    value = call.request.headers.get(DECODE_HEADER)
    if value is None:
        return False
    if value != "true":
        raise CallerError(ErrorCode.INVALID_ARGUMENT, f"the value of {DECODE_HEADER} is true", field=DECODE_HEADER)
    if request.range is not None or request.part_number is not None:
        problem = "decoded bytes have no ranges and no parts here"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field=DECODE_HEADER)
    return True
