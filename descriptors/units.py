"""Units. Code counts bytes, seconds and bytes per second; Gbps appears only where people read or type."""

from __future__ import annotations

import re
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40


_SIZE = re.compile(r"(\d{1,20}(?:\.\d{0,20})?(?:e\d{1,2})?) {0,4}([kmgtp]?)(i?)b?", re.IGNORECASE | re.ASCII)
_POWERS = "kmgtp"


def parse_bytes(text: str) -> int:
    """A size in bytes as people write it: 65536, 200e9, 200GB, 64 MiB. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is no size: write 65536, 200e9, 200GB or 64MiB")
    power = _POWERS.find(found[2].lower()) + 1 if found[2] else 0
    unit = Fraction(1024 if found[3] else 1000) ** power
    return round(Fraction(found[1]) * unit)


def bytes_per_s_from_gbps(rate_gbps: float) -> float:
    """Decimal gigabits per second, as the paper's tables count them, to bytes per second."""
    return rate_gbps * 1e9 / 8


def gbps_from_bytes_per_s(rate_bytes_per_s: float) -> float:
    """Bytes per second to decimal gigabits per second."""
    return rate_bytes_per_s * 8 / 1e9


def format_bytes(nbytes: int) -> str:
    """Bytes for people, in binary units."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
