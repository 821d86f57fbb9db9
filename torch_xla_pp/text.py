"""Types, numbers and tables as readable text."""

from collections.abc import Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNTS = ("", "K", "M", "G", "T", "P")


def type_text(shape: Sequence[int] | None, dtype: object) -> str:
    """Write a tensor's dtype and shape, such as "float32[2, 3]".

    Args:
        shape: Its shape, None if it is unknown.
        dtype: Its `torch.dtype`, None likewise.
    """
    kind = "" if dtype is None else str(dtype).removeprefix("torch.")
    return kind + ("" if shape is None else str(list(shape)))


def seconds_text(seconds: float) -> str:
    """Write a time, such as "1.25 ms"."""
    for unit, name in _SECONDS:
        if abs(seconds) >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def bytes_text(count: int) -> str:
    """Write a size, such as "1.5 MiB"."""
    return _scaled(count, 1024, _BYTES, " ")


def count_text(count: int) -> str:
    """Write a number, such as "1.5M"."""
    return _scaled(count, 1000, _COUNTS, "")


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


def _scaled(count: int, base: int, units: Sequence[str], gap: str) -> str:
    """Write a number with two digits or more, in the largest unit that fits."""
    power = 0
    while power + 1 < len(units) and count >= base ** (power + 1):
        power += 1
    value = count / base**power
    digits = 0 if power == 0 or value >= 100 else 1
    return f"{value:.{digits}f}{gap}{units[power]}"
