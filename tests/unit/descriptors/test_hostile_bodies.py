"""Bodies nobody should send."""

from __future__ import annotations

import pytest

from descriptors.descriptor import Descriptor
from descriptors.descriptor_codec import decode_descriptor
from descriptors.errors import CallerError, ErrorCode


@pytest.mark.parametrize("items", [b'"",' * 300_000 + b'""', b"1," * 2000 + b"1"], ids=["strings", "numbers"])
def test_lists_of_nonsense_are_refused_at_their_first_item(items: bytes) -> None:
    """Not described item by item in gigabytes of errors."""
    head = b'{"version":1,"chunk_keys":["a"],"num_layers":1,"chunk_tokens":1,"per_layer_chunk_bytes":1,'
    with pytest.raises(CallerError) as refused:
        decode_descriptor(head + b'"layer_compute_us":[' + items + b"]}")
    assert len(str(refused.value)) < 500
    many = b",".join(b'"f%d":1' % index for index in range(100_000))
    with pytest.raises(CallerError, match="is not a field"):
        decode_descriptor(head + many + b"}")


def test_stored_keys_and_descriptors_refuse_nul() -> None:
    """SQLite's JSON would end the key there and find another object."""
    with pytest.raises(CallerError) as refused:
        Descriptor(("a\0b",), 1, 1, 1)
    assert refused.value.code is ErrorCode.INVALID_DESCRIPTOR
