"""Numbers and tables as a person reads them."""

from collections.abc import Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def seconds_text(seconds: float) -> str:
    """Write a time, such as "1.25 ms"."""
    for unit, name in _SECONDS:
        if abs(seconds) >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def bytes_text(count: int) -> str:
    """Write a size, such as "1.50 MiB"."""
    for unit, name in _BYTES:
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the first column to the left, the others to the right."""
    columns = zip(header, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in (header, *rows):
        cells = [first.ljust(widths[0])]
        cells += [o.rjust(w) for o, w in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
