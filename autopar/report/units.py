"""Numbers as people read them."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """`1.23 s`, `45.6 ms`, `7.89 us`, `1.2 ns`: three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:,.0f} {unit}"
    return "0 s" if seconds == 0 else f"{seconds:.1e} s"


def gib_text(size_bytes: int) -> str:
    """`12.3 GiB`, below one `45.6 MiB`, below that `7.89 KiB`: three digits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            value = size_bytes / size
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{size_bytes} B"


def count_text(number: int) -> str:
    """`124 million`, `70.6 billion`: three digits."""
    for word, size in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def share_text(share: float) -> str:
    """A share as per cent: `3.4 %`, `56 %`."""
    percent = share * 100
    return f"{percent:.1f} %" if abs(percent) < 10 else f"{percent:.0f} %"
