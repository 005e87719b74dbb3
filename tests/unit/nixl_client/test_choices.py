"""Names of choices a caller may give."""

from __future__ import annotations

import pytest

from descriptors.descriptor import Delivery, OnMissing
from nixl_client.client import Transport
from nixl_client.objects import Path
from nixl_client.options import enum_member


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Delivery, "delivery", "layer-mayor"),
        (OnMissing, "on_missing", "ignore"),
        (Transport, "transport", "SHM"),
        (Path, "path", ""),
        (Delivery, "delivery", None),
        (Delivery, "delivery", OnMissing.FAIL),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(kind: type, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        enum_member(kind, value, name)  # type: ignore[arg-type]
    for member in kind:  # type: ignore[attr-defined]
        assert repr(member.value) in str(refused.value)
        assert enum_member(kind, member.value, name) is enum_member(kind, member, name) is member
