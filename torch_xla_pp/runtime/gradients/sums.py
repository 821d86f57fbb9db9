"""The sums of a step's gradients, and the programs that begin and end them.

Every backward adds to sums whose buffers are donated to it, so a step begins with sums
of its own. They start from the parameters' `.grad`, which the user may keep, or from
zero.

Sums that are kept per group of rows (see `compile.group_sums`) start from zero. At the
end of the step one program adds up the groups and `.grad`: devices exchange gradients
there, once a step.
"""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import (
    Function,
    Program,
    ProgramSpec,
    StagePrograms,
    SummedGrads,
    ValueSizes,
    accumulated,
    accumulator,
    device_bytes,
    given_grad,
)
from torch_xla_pp.state import DonatedValues, ModuleState


class GradientSums:
    """The gradients of a stage in one step, and the one owner of their buffers.

    Sums have the names that `accumulator` gives them.

    Args:
        state: The stage's parameters.
    """

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._sums: dict[str, Tensor] = {}
        self._donated = DonatedValues()
        self._given_bytes = self._sum_bytes = 0
        self._programs: WeakKeyDictionary[StagePrograms, SumPrograms]
        self._programs = WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of gradients on one device.

        They include the sums of the last step, those that passed as one, which are held
        beside them when they are taken apart, and gradients that parameters had before,
        which are kept until the step is done.
        """
        return self._given_bytes + self._sum_bytes

    def compiled(self, programs: StagePrograms) -> dict[str, Program]:
        """Return the programs that have run at the end of steps, by what they do."""
        return self._of(programs).compiled

    def begin_step(self) -> None:
        """Forget the sums of the last step; after the state has begun the step."""
        grads = [v.grad for v in self._state.fixed.values() if v.grad is not None]
        self._sums = {}
        self._sum_bytes, self._given_bytes = 0, sum(device_bytes(grads))

    def drop(self) -> None:
        """Forget the sums of a step that failed."""
        self._sums = {}

    def values(self, programs: StagePrograms) -> dict[str, Tensor]:
        """Return the sums so far.

        The first call of a step starts from `.grad`, or from zero if it is None.
        """
        if not self._sums:
            fixed = self._state.fixed
            self._sums = self._of(programs).start(fixed, self._state.grads())
        return self._sums

    def of(self, role: str) -> Tensor:
        """Return the gradient of a parameter in this step, zeros if it has none."""
        found = self._sums.get(accumulator(role))
        if found is None:
            value = self._state.fixed[role]
            found = torch.zeros_like(value)
            xla_compat.annotate(found, xla_compat.sharding_of(value))
            xla_compat.materialize([found])
        return found

    def take(self) -> dict[str, Tensor]:
        """Remove and return all sums; `update` must bring new ones."""
        sums, self._sums = self._sums, {}
        return sums

    def update(self, sums: Mapping[str, Tensor]) -> None:
        """Replace some sums by others, whose buffers no program has reused."""
        self._sums |= sums

    def advance(self, sums: Mapping[str, Tensor]) -> None:
        """Replace the sums by those that a backward returned.

        The buffers of the old ones were donated.
        """
        self._donated.add(self._sums.values())
        self._sums = dict(sums)

    def reduce(self, programs: StagePrograms) -> None:
        """Take bundles apart, add up sums per group of rows; at the end of a step."""
        own = self._of(programs)
        before = self._sums
        if before:
            self._sums = own.apart(before)
        self._sum_bytes = own.sizes.of({**before, **self._sums})
        if own.summed.groups and self._sums:
            reduced = own.reduce(self._sums, self._state.grads())
            self._donated.add([self._sums[name] for name in reduced])
            self._sums |= reduced

    def publish(self) -> None:
        """Make the sums the parameters' `.grad`; called once, when a step is done."""
        for role, value in self._state.fixed.items():
            # A frozen parameter with copies elsewhere may have a sum, too.
            if accumulator(role) in self._sums and value.requires_grad:
                value.grad = self._sums[accumulator(role)]
        self._sums = {}

    def _of(self, programs: StagePrograms) -> "SumPrograms":
        if programs not in self._programs:
            self._programs[programs] = SumPrograms(programs.summed)
        return self._programs[programs]


class SumPrograms:
    """The programs that begin and end the sums of a stage's gradients.

    Args:
        summed: Which gradients are summed up.

    Attributes:
        summed: As given.
        sizes: The bytes of the sums.
    """

    def __init__(self, summed: SummedGrads) -> None:
        self.summed = summed
        self.sizes = ValueSizes()
        # Keyed by the parameters that have a gradient already.
        self._starts: dict[tuple[str, ...], Program] = {}
        self._reductions: dict[tuple[str, ...], Program] = {}
        self._parts: Program | None = None

    @property
    def compiled(self) -> dict[str, Program]:
        """Return the programs that have run at the end of steps, by what they do."""
        # The last one that was made stands for the others.
        last = next(reversed(self._reductions.values()), None)
        return {} if last is None else {"gradient reduction": last}

    def start(
        self, parameters: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Enqueue the making of a step's first sums.

        Args:
            parameters: Role → parameter.
            grads: Role → gradient that a parameter has already, sharded like it.

        Returns:
            A sum for each parameter that gets a gradient; small ones are bundled.
        """
        roles, groups = self.summed.sums, self.summed.groups
        if not roles:
            return {}
        given = tuple(role for role in roles if role in grads and role not in groups)
        if given not in self._starts:
            like = {role: parameters[role] for role in roles}
            function = Function(
                name="gradient sums",
                module=_Start(like, given, groups),
                inputs=tuple(map(given_grad, given)),
                outputs=tuple(map(accumulator, roles)),
            )
            pins = {accumulator(role): pin for role, pin in roles.items()}
            self._starts[given] = Program(
                ProgramSpec(
                    function=function,
                    pins=pins,
                    checked=function.inputs,
                    bundles=self.summed.bundles,
                )
            )
        return self._starts[given]({given_grad(role): grads[role] for role in given})

    def apart(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueue the taking apart of bundles, if there are any; return all sums."""
        if not self.summed.bundles:
            return dict(sums)
        if self._parts is None:
            bundled = [name for bundle in self.summed.bundles for name in bundle.shapes]
            new = [role for role in self.summed.sums if accumulator(role) in bundled]
            function = Function(
                name="gradient parts",
                module=_Parts(),
                inputs=tuple(map(accumulator, new)),
                outputs=tuple(map(accumulated, new)),
            )
            pins = {accumulated(role): self.summed.grads[role] for role in new}
            spec = ProgramSpec(
                function=function, pins=pins, bundles=self.summed.bundles
            )
            self._parts = Program(spec)
        others = dict(sums)
        results = self._parts(
            {bundle.name: others.pop(bundle.name) for bundle in self.summed.bundles}
        )
        names = zip(self._parts.spec.function.inputs, self._parts.outputs, strict=True)
        return others | {name: results[new] for name, new in names}

    def reduce(
        self, sums: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Enqueue the adding up of sums per group, at the end of a step.

        Args:
            sums: All sums; those per group are void afterwards.
            grads: Role → gradient that a parameter has already, sharded like it.

        Returns:
            The sums that were per group, sharded like their parameters.
        """
        groups = self.summed.groups
        given = tuple(role for role in groups if role in grads)
        if given not in self._reductions:
            self._reductions[given] = self.reduction(given)
        values = {**sums, **{given_grad(role): grads[role] for role in given}}
        results = self._reductions[given](values)
        return {accumulator(role): results[accumulated(role)] for role in groups}

    def reduction(self, given: Sequence[str] = ()) -> Program:
        """Return a program that adds up the sums per group.

        Args:
            given: Roles whose parameters have a gradient already.
        """
        groups = self.summed.groups
        parts, checked = [*map(accumulator, groups)], [*map(given_grad, given)]
        function = Function(
            name="gradient reduction",
            module=_Reduction([role in given for role in groups]),
            inputs=(*parts, *checked),
            outputs=tuple(map(accumulated, groups)),
        )
        pins = {accumulated(role): pin for role, pin in self.summed.grads.items()}
        return Program(
            ProgramSpec(function=function, pins=pins, checked=checked, donated=parts)
        )


class _Start(nn.Module):
    """New sums of parameters: a copy of a gradient, or zeros, per group of rows."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        given: Sequence[str],
        groups: Mapping[str, int],
    ) -> None:
        super().__init__()
        self._zeros = {
            role: ((*((groups[role],) if role in groups else ()), *p.shape), p.dtype)
            for role, p in parameters.items()
            if role not in given
        }
        self._roles = list(parameters)

    def forward(self, *grads: Tensor) -> list[Tensor]:
        left = iter(grads)
        device = xla_compat.device()
        sums = []
        for role in self._roles:
            if role in self._zeros:
                shape, dtype = self._zeros[role]
                sums.append(torch.zeros(shape, dtype=dtype, device=device))
            else:
                # A product is a new buffer, even where the program does nothing else.
                sums.append(next(left) * 1)
        return sums


class _Parts(nn.Module):
    """Copies of values."""

    def forward(self, *values: Tensor) -> list[Tensor]:
        return [value * 1 for value in values]


class _Reduction(nn.Module):
    """The sums over all groups, added to gradients that parameters had already."""

    def __init__(self, has_grad: Sequence[bool]) -> None:
        super().__init__()
        self._has_grad = has_grad

    def forward(self, *values: Tensor) -> list[Tensor]:
        count = len(self._has_grad)
        grads = iter(values[count:])
        totals = [parts.sum(0) for parts in values[:count]]
        return [
            next(grads) + total if has_grad else total
            for total, has_grad in zip(totals, self._has_grad, strict=True)
        ]
