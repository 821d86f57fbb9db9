"""Models with more layers than were traced, by repeating one of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch_xla_pp.work.works import ParameterDim, Work, WorkValue, renamed_dims

LayeredParts = tuple[tuple[Work, ...], tuple[WorkValue, ...]]


@dataclass(frozen=True, slots=True)
class LayeredModel:
    """A model whose layers may be repeated.

    Args:
        works: Its works, in program order.
        values: The values between them.
        outputs: Names of the values that it returns.
    """

    works: Sequence[Work]
    values: Sequence[WorkValue]
    outputs: Sequence[str]

    def repeated(self, path: str, count: int) -> LayeredParts:
        """Return works and values of a model that has more equal layers in a row.

        It looks for two adjacent layers of equal cost, of which the second uses values
        of the first and values that both use, and puts copies of the second between
        them. Works that belong to no layer, such as one across the border of two
        layers, are left as they are.

        Args:
            path: Path of the layers, such as "layers" for `layers.0`, `layers.1`, …
            count: How many there are to be in all.

        Raises:
            ValueError: There are no such layers, more of them already, or no two
                adjacent ones are equal.
        """
        layers = _layers_of(self, path)
        if not layers or count < len(layers):
            found = f"{len(layers)}" if layers else "none"
            raise ValueError(
                f"repeated: expected {path!r} to name layers such as {path}.0, at most "
                f"{count} of them, got {found}. Name others, or take a larger count."
            )
        pair = next((p for p in sorted(layers) if _are_equal(self, layers, p)), None)
        if pair is None:
            raise ValueError(
                f"repeated: expected two neighbours of {path!r} that cost the same, "
                "the second of which takes values of the first alone, got "
                f"{len(layers)} layers without. Trace the model with more equal layers."
            )
        added = count - len(layers)
        return _Repeats(self, path, layers[pair], layers[pair + 1], added).parts()


def _layers_of(model: LayeredModel, path: str) -> dict[int, list[Work]]:
    """Return the works of each numbered layer."""
    found: dict[int, list[Work]] = {}
    for work in model.works:
        number = _number(work.module, path)
        if number is not None:
            found.setdefault(number, []).append(work)
    return found


def _number(name: str, path: str) -> int | None:
    """Return the number of a name's layer."""
    if not name.startswith(f"{path}."):
        return None
    word = name.removeprefix(f"{path}.").split(".")[0]
    return int(word) if word.isdigit() else None


def _are_equal(
    model: LayeredModel, layers: Mapping[int, Sequence[Work]], number: int
) -> bool:
    """Return whether a layer and the next one cost the same and form a chain."""
    first, second = layers[number], layers.get(number + 1, ())
    if [work.digest for work in first] != [work.digest for work in second]:
        return False
    names, after = ({work.name for work in works} for works in (first, second))
    twin = {a.name: b.name for a, b in zip(first, second, strict=True)}
    is_linked = False
    for value in model.values:
        users = set(value.users)
        is_made = value.producer in names
        is_linked |= is_made and bool(users & after)
        if is_made and (not users <= names | after or value.name in model.outputs):
            return False
        is_shared = value.producer not in names | after
        in_first = {twin[user] for user in users & names}
        if is_shared and users & after and in_first != users & after:
            return False
    made, again = ([*_made(model, works)] for works in (first, second))
    return is_linked and len(made) == len(again)


def _made(model: LayeredModel, works: Sequence[Work]) -> list[WorkValue]:
    """Return the values that works make, in their order."""
    return [v for work in works for v in model.values if v.producer == work.name]


class _Repeats:
    """Copies of a layer, put between the one before and itself.

    Args:
        model: The model.
        path: Path of the layers.
        first: The works of the layer before.
        second: The works of the layer to copy.
        added: How many copies.
    """

    def __init__(
        self,
        model: LayeredModel,
        path: str,
        first: Sequence[Work],
        second: Sequence[Work],
        added: int,
    ) -> None:
        self._model, self._path, self._added = model, path, added
        self._second = second
        self._number = _number(second[0].module, path) or 0
        self._inside = {work.name for work in second}
        made, again = _made(model, first), _made(model, second)
        self._twins = {a.name: b for a, b in zip(made, again, strict=True)}
        self._within = {work.name for work in first}
        names = [p.tied for w in model.works for p in w.parameters if p.tied]
        own = [p.tied for w in second for p in w.parameters if p.tied]
        self._own_ties = {n for n in own if own.count(n) == names.count(n)}

    def parts(self) -> LayeredParts:
        """Return the works and values of the deeper model."""
        model = self._model
        place = model.works.index(self._second[0])
        copies = [self._work(w, n) for n in self._copies for w in self._second]
        works = [
            *model.works[:place],
            *copies,
            *(self._moved(work) for work in model.works[place:]),
        ]
        order = {work.name: number for number, work in enumerate(works)}
        longer = [
            v
            for value in model.values
            for v in self._values(value, renamed_dims(value.dims, self._later))
        ]
        values = [
            value.with_works(lambda names: sorted(names, key=order.__getitem__))
            for value in longer
        ]
        return tuple(works), tuple(values)

    @property
    def _copies(self) -> range:
        return range(1, self._added + 1)

    def _values(
        self, value: WorkValue, dims: tuple[ParameterDim, ...]
    ) -> list[WorkValue]:
        """Return a value with new dimensions, and what copies make in place of it."""
        value = replace(value, dims=dims)
        if value.name in self._twins:
            return [self._passed_on(value, value, 0), *self._copied(value)]
        if value.producer in self._inside:
            return [replace(value, view_of=self._whole(value, self._added + 1))]
        return [value.with_works(lambda names: (*names, *self._named(names)))]

    def _named(self, works: Sequence[str]) -> list[str]:
        """Return the names of the copies of those works that are in the layer."""
        own = [name for name in works if name in self._inside]
        return [_copy(name, n) for n in self._copies for name in own]

    def _copied(self, value: WorkValue) -> list[WorkValue]:
        """Return for each copy the counterpart of a value of the layer before."""
        twin = self._twins[value.name]
        found = []
        for number in self._copies:
            place = self._number + number - 1
            inside = replace(
                twin.with_works(partial(self._in_layer, number=number)),
                name=_copy(twin.name, number),
                producer=_copy(twin.producer or "", number),
                dims=renamed_dims(twin.dims, self._in_copy(place)),
                view_of=self._whole(twin, number),
            )
            found.append(self._passed_on(inside, value, number))
        return found

    def _in_layer(self, works: Sequence[str], number: int) -> list[str]:
        """Return the names that works of the layer have in a copy."""
        return [_copy(name, number) for name in works if name in self._inside]

    def _whole(self, value: WorkValue, number: int) -> str | None:
        """Return what a value of a copy of the layer is a view of.

        Args:
            value: The value of the layer.
            number: Number of the copy; the layer itself follows the last.
        """
        whole = value.view_of
        if whole in self._twins:
            return _copy(self._twins[whole].name, number - 1) if number > 1 else whole
        own = {twin.name for twin in self._twins.values()}
        is_copied = whole in own and number <= self._added
        return _copy(whole, number) if whole and is_copied else whole

    def _passed_on(self, value: WorkValue, like: WorkValue, number: int) -> WorkValue:
        """Let the layer after a copy use its values as the second uses the first's."""
        last = number == self._added

        def after(names: Sequence[str]) -> list[str]:
            own = [name for name in names if name in self._inside]
            return own if last else [_copy(name, number + 1) for name in own]

        own = value.with_works(
            lambda names: [n for n in names if number or n in self._within]
        )
        return replace(
            own,
            users=(*own.users, *after(like.users)),
            kept_by=(*own.kept_by, *after(like.kept_by)),
            passed_by=(*own.passed_by, *after(like.passed_by)),
            passed_again_by=(*own.passed_again_by, *after(like.passed_again_by)),
            unread_by=(*own.unread_by, *after(like.unread_by)),
        )

    def _work(self, work: Work, number: int) -> Work:
        """Return a copy of a work."""
        place = self._number + number - 1
        renamed = work.renamed(self._in_copy(place))
        parameters = tuple(
            replace(
                p, tied=_copy(p.tied, number) if p.tied in self._own_ties else p.tied
            )
            for p in renamed.parameters
        )
        return replace(
            renamed,
            name=_copy(work.name, number),
            ops=tuple(_copy(op, number) for op in work.ops),
            module=self._renumbered(work.module, place),
            parameters=parameters,
        )

    def _moved(self, work: Work) -> Work:
        """Renumber the modules of a later work."""
        number = _number(work.module, self._path)
        if number is None or number < self._number:
            return work
        module = self._renumbered(work.module, number + self._added)
        return replace(work.renamed(self._later), module=module)

    def _in_copy(self, place: int) -> Callable[[str], str]:
        """Return what names the parameters of the layer as those of a copy of it."""

        def name_of(name: str) -> str:
            is_own = _number(name, self._path) == self._number
            return self._renumbered(name, place) if is_own else name

        return name_of

    def _later(self, name: str) -> str:
        """Return the name of a parameter that comes after the copies."""
        number = _number(name, self._path)
        if number is None or number < self._number:
            return name
        return self._renumbered(name, number + self._added)

    def _renumbered(self, name: str, number: int) -> str:
        old = _number(name, self._path)
        if old is None:
            return name
        rest = name.removeprefix(f"{self._path}.{old}")
        return f"{self._path}.{number}{rest}"


def _copy(name: str, number: int) -> str:
    return f"{name}_copy_{number}"
