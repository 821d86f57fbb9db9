"""New pictures; matplotlib is imported only for them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty picture of a size in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "timeline: expected matplotlib, which draws pictures, got an environment "
            "without it. Run `pip install matplotlib`, or write a trace instead."
        ) from error
    return Figure(figsize=(width, height))
