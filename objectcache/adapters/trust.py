"""The certificate authorities that connections to servers trust: the system's, or those of AWS_CA_BUNDLE."""

from __future__ import annotations

import os
import ssl

CA_BUNDLE = "AWS_CA_BUNDLE"
"""A PEM file, as for botocore and the AWS CLI."""


def client_context() -> ssl.SSLContext:
    """A TLS context for connections to servers. Raises OSError that names the file, where it cannot be used."""
    file = os.environ.get(CA_BUNDLE) or None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # an ssl.SSLError, too
        raise OSError(error.errno, f"{CA_BUNDLE}: {error.strerror or error}", file) from None
