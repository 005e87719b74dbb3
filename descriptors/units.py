"""Units. Code counts bytes, seconds and bytes per second; Gbps appears only where people read or type."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def bytes_per_s_from_gbps(rate_gbps: float) -> float:
    """Decimal gigabits per second, as the paper's tables count them, to bytes per second."""
    return rate_gbps * 1e9 / 8


def gbps_from_bytes_per_s(rate_bytes_per_s: float) -> float:
    """Bytes per second to decimal gigabits per second."""
    return rate_bytes_per_s * 8 / 1e9
