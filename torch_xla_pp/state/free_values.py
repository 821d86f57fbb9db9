"""Values that nothing reads any more, for programs that make values as large."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from torch_xla_pp.compile import ValueSizes


class FreeValues:
    """The free values of a rank on a device, by their bytes.

    A result of a program takes the memory of one that is as large, whatever it is and
    whatever program of whatever stage has made it: XLA's CPU client compares bytes
    alone.
    """

    def __init__(self) -> None:
        self._values: dict[int, list[Tensor]] = {}

    @property
    def sizes(self) -> list[int]:
        """Return how many bytes each value takes."""
        return [size for size, values in self._values.items() for _ in values]

    def put(self, values: Mapping[str, Tensor], sizes: ValueSizes) -> None:
        """Keep values.

        Args:
            values: By name.
            sizes: Their sizes.
        """
        for name, value in values.items():
            self._values.setdefault(sizes[name], []).append(value)

    def take(self, names: Iterable[str], sizes: ValueSizes) -> dict[str, Tensor]:
        """Return a value for each name, as far as there are some.

        Args:
            names: Names of results that are to have the memory.
            sizes: The sizes of those that have been made before.
        """
        return {
            name: self._values[sizes[name]].pop()
            for name in names
            if name in sizes and self._values.get(sizes[name])
        }

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
