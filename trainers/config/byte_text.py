"""How sizes are written, in pages, tables, logs and messages. Imports no torch."""

from __future__ import annotations

import math


def byte_text(count: float | None) -> str:
    """`0 B`, `999 B`, `1.5 KiB`, `574 MiB`, `23.4 GiB`; a dash for None and non-finite values.

    Sizes stand beside each other in sentences, tables and pictures, so all are written by this rule.
    """
    if count is None or not math.isfinite(count):
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
