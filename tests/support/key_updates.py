"""A side of a TLS connection, in memory, that sends KeyUpdate messages: Python's module cannot."""

from __future__ import annotations

import _ssl
import ctypes
from typing import Any

import pytest

_PIECE_BYTES = 1 << 16
_POINTER_FUNCTIONS = ("TLS_client_method", "TLS_server_method", "SSL_CTX_new", "SSL_new", "BIO_s_mem", "BIO_new")


def _library() -> Any:
    """The OpenSSL that Python uses. Skips the test where Python hides it."""
    library = ctypes.CDLL(_ssl.__file__)
    if not hasattr(library, "SSL_key_update"):
        pytest.skip("this Python has its OpenSSL for itself")
    for name in _POINTER_FUNCTIONS:
        getattr(library, name).restype = ctypes.c_void_p
    return library


class KeyUpdates:
    """A client, or with the files of a certificate and its key a server. `take` what has come, and send `given`."""

    def __init__(self, certificate: tuple[str, str] | None = None) -> None:
        self._library = library = _library()
        method = library.TLS_client_method if certificate is None else library.TLS_server_method
        context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(method())))
        if certificate is not None:
            chain, key = (file.encode() for file in certificate)
            assert library.SSL_CTX_use_certificate_chain_file(context, chain) == 1
            assert library.SSL_CTX_use_PrivateKey_file(context, key, 1) == 1
        self._tls = ctypes.c_void_p(library.SSL_new(context))
        self._incoming, self._outgoing = (self._memory() for _ in range(2))
        library.SSL_set_bio(self._tls, self._incoming, self._outgoing)
        (library.SSL_set_connect_state if certificate is None else library.SSL_set_accept_state)(self._tls)

    def _memory(self) -> ctypes.c_void_p:
        library = self._library
        return ctypes.c_void_p(library.BIO_new(ctypes.c_void_p(library.BIO_s_mem())))

    def shake(self, data: bytes = b"") -> bool:
        """Go on with the handshake; whether it is done."""
        self._library.BIO_write(self._incoming, data, len(data))
        return bool(self._library.SSL_do_handshake(self._tls) == 1)

    def update(self, count: int) -> None:
        """Send so many messages, each of which asks for one in return."""
        for _ in range(count):
            assert self._library.SSL_key_update(self._tls, 1) == 1
            self._library.SSL_do_handshake(self._tls)

    def given(self) -> bytes:
        """The bytes that are to be sent."""
        piece, given = ctypes.create_string_buffer(_PIECE_BYTES), b""
        while (count := self._library.BIO_read(self._outgoing, piece, _PIECE_BYTES)) > 0:
            given += piece.raw[:count]
        return given
