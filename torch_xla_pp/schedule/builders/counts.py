"""Check the sizes that a schedule is built for."""


def check_counts(builder: str, **counts: int) -> None:
    """Refuse counts below one, all at once.

    Raises:
        ValueError: There are some; the builder and all of them are named.
    """
    faults = [f"{name}={count}" for name, count in counts.items() if count < 1]
    if faults:
        raise ValueError(
            f"{builder}: expected counts of at least 1, got {', '.join(faults)}. "
            "Count ranks, microbatches and stages from one."
        )
