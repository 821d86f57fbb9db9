"""The compiled programs of one stage for one signature of its inputs.

Values are kept by name (see `compile.export` for the roles). `fixed` values belong to
the stage: parameters, buffers, constants and gradient sums. `live` values belong to
one microbatch and die with its backward.

Where a stage has *borders*, its programs receive and send themselves: the values of a
border are then neither passed in nor returned, but `route:in` and `route:out` are
passed in.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.border import ROUTE_IN, ROUTE_OUT, Border
from torch_xla_pp.compile.constants import Constants
from torch_xla_pp.compile.export import JointGraph
from torch_xla_pp.compile.partition import (
    Function,
    Remat,
    StageFunctions,
    accumulator,
    partition_joint,
)
from torch_xla_pp.compile.program import Program
from torch_xla_pp.compile.sums import given_grad, starting_sums
from torch_xla_pp.transport import ShardLayout

Values = dict[str, Tensor]
Layouts = Mapping[int, ShardLayout]


class Borders(NamedTuple):
    """Say which values the programs of a stage exchange with other ranks themselves.

    Each maps the index of an input or output to its layout, in the order of the
    message; an empty one means that there is no such message.

    Attributes:
        inputs: Inputs that the forward receives.
        outputs: Outputs that the forward sends.
        tangents: Outputs whose gradients the backward receives.
        grads: Inputs whose gradients the backward sends.
    """

    inputs: Layouts = {}
    outputs: Layouts = {}
    tangents: Layouts = {}
    grads: Layouts = {}


class Forwarded(NamedTuple):
    """Hold what the forward of one microbatch gives.

    Attributes:
        outputs: Tensor outputs of the stage, in order; none if they were sent.
        live: What the backward of this microbatch will read.
        updates: Buffer role → new value.
    """

    outputs: list[Tensor]
    live: Values
    updates: Values


class StagePrograms:
    """Hold the programs of a stage: forward, inference, and the backwards.

    Args:
        joint: Joint graph of the stage.
        output_shardings: Sharding of each output.
        input_shardings: Sharding of each tensor input; gradients get the same.
        fixed_shardings: Role → sharding of parameters and buffers; gradient sums
            and new buffers get the same.
        borders: What the programs receive and send themselves.
        remat: Which forward values are computed again in the backward.
    """

    def __init__(
        self,
        joint: JointGraph,
        output_shardings: Sequence[xla_compat.OpSharding],
        input_shardings: Sequence[xla_compat.OpSharding],
        fixed_shardings: Mapping[str, xla_compat.OpSharding],
        borders: Borders | None = None,
        *,
        remat: Remat = "none",
    ) -> None:
        borders = borders or Borders()
        functions = partition_joint(joint, remat)
        self._functions = functions
        self.output_spec: pytree.TreeSpec = joint.output_spec
        self._constants = Constants(joint.constants)
        pins = _pins(functions, output_shardings, input_shardings, fixed_shardings)
        inputs = [f"input:{i}" for i in range(len(input_shardings))]
        tangents = [f"tangent:{i}" for i in range(len(output_shardings))]
        arriving = _border([f"input:{i}" for i in borders.inputs], borders.inputs)
        leaving = _border(
            [functions.outputs[i] for i in borders.outputs], borders.outputs
        )
        coming_back = _border(
            [f"tangent:{i}" for i in borders.tangents], borders.tangents
        )
        going_back = _border(
            [functions.input_grads.get(i) for i in borders.grads], borders.grads
        )
        # What the caller gets; gradients that are sent are not among it.
        grads = set() if going_back else {*functions.input_grads.values(), None}
        sums = {*functions.parameter_grads.values()}
        # A backward of inputs alone receives for the rest of the backward, too.
        has_first = functions.backward_input is not None or going_back is not None
        donated = [accumulator(role) for role in functions.parameter_grads]
        self._backward_weight = _program(
            functions.backward_weight,
            pins,
            tangents,
            donated=donated,
            received=None if has_first else coming_back,
        )
        self._backward_input = _program(
            functions.backward_input,
            pins,
            tangents,
            received=coming_back,
            sent=going_back,
            wanted=grads | _reads(self._backward_weight),
        )
        self._backward = _program(
            functions.backward,
            pins,
            tangents,
            donated=donated,
            received=coming_back,
            sent=going_back,
            wanted=grads | sums,
        )
        kept = _reads(self._backward) | _reads(self._backward_input)
        first = self._backward_input
        made = set() if first is None else set(first.outputs)
        kept |= _reads(self._backward_weight) - made
        if not going_back:
            kept |= {n for n in functions.input_grads.values() if n is not None}
        self._kept = kept - {ROUTE_IN, ROUTE_OUT}
        self._outputs = () if leaving else functions.outputs
        results = {*self._outputs, *functions.buffer_updates.values()}
        self._forward = Program(
            functions.forward,
            pins,
            inputs,
            received=arriving,
            sent=leaving,
            wanted=results | kept,
        )
        self._inference = Program(
            functions.inference,
            pins,
            inputs,
            received=arriving,
            sent=leaving,
            wanted=results,
        )
        self._sends_grads = going_back is not None
        self._sum_pins = {
            accumulator(role): fixed_shardings[role]
            for role in functions.parameter_grads
        }
        self._starts: dict[tuple[str, ...], Program] = {}

    @property
    def has_backward(self) -> bool:
        """Return whether there is any gradient to compute."""
        return self._functions.backward is not None or bool(self._functions.input_grads)

    def forward(
        self, fixed: Mapping[str, Tensor], live: Values, seed: int
    ) -> Forwarded:
        """Enqueue the forward of one microbatch and keep what its backward reads.

        Args:
            fixed: The stage's values.
            live: `input:` entries, and routes where there are borders.
            seed: Seed of the microbatch's random numbers.
        """
        return self._run_forward(self._forward, fixed, live, seed, is_kept=True)

    def inference(
        self, fixed: Mapping[str, Tensor], live: Values, seed: int
    ) -> Forwarded:
        """Enqueue the forward of one microbatch that has no backward."""
        return self._run_forward(self._inference, fixed, live, seed, is_kept=False)

    def start_sums(
        self, fixed: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> Values:
        """Enqueue the making of a step's first gradient sums.

        Args:
            fixed: The stage's values.
            grads: Role → gradient that a parameter has already, laid out like it.

        Returns:
            A `sum:` entry for each parameter that gets a gradient.
        """
        roles = self._functions.parameter_grads
        given = tuple(role for role in roles if role in grads)
        if not roles:
            return {}
        if given not in self._starts:
            function = starting_sums({role: fixed[role] for role in roles}, given)
            self._starts[given] = Program(function, self._sum_pins, function.inputs)
        return self._starts[given]({given_grad(role): grads[role] for role in given})

    def backward(
        self, fixed: Mapping[str, Tensor], live: Values
    ) -> tuple[dict[int, Tensor | None], Values]:
        """Enqueue the full backward of one microbatch.

        Args:
            fixed: The stage's values, with `sum:` entries for gradients so far, which
                are void afterwards.
            live: What `forward` kept, with `tangent:` entries added.

        Returns:
            Input index → gradient (None for zero), nothing if the program sends them,
            and the new `sum:` entries.
        """
        results = self._run(self._backward, fixed, live)
        return self._input_grads({**live, **results}), self._sums(results)

    def backward_input(
        self, fixed: Mapping[str, Tensor], live: Values
    ) -> tuple[dict[int, Tensor | None], Values]:
        """Enqueue the part of the backward that gives the gradients of inputs.

        Returns:
            Input index → gradient, and what `backward_weight` needs as `live`.
        """
        results = self._run(self._backward_input, fixed, live)
        everything = {**live, **results}
        reads = _reads(self._backward_weight)
        residual = {n: v for n, v in everything.items() if n in reads}
        return self._input_grads(everything), residual

    def backward_weight(self, fixed: Mapping[str, Tensor], live: Values) -> Values:
        """Enqueue the rest of the backward; return the new `sum:` entries.

        The `sum:` entries of `fixed` are void afterwards.
        """
        return self._sums(self._run(self._backward_weight, fixed, live))

    def _run_forward(
        self,
        program: Program,
        fixed: Mapping[str, Tensor],
        live: Values,
        seed: int,
        *,
        is_kept: bool,
    ) -> Forwarded:
        values = {**fixed, **self._constants.values(), **live}
        results = program(values, seed)
        everything = {**values, **results}
        kept = {**live, **results} if is_kept else {}
        return Forwarded(
            outputs=[everything[name] for name in self._outputs],
            live={name: value for name, value in kept.items() if name in self._kept},
            updates={
                role: results[name]
                for role, name in self._functions.buffer_updates.items()
            },
        )

    def _run(
        self, program: Program | None, fixed: Mapping[str, Tensor], live: Values
    ) -> Values:
        if program is None:
            return {}
        return program({**fixed, **self._constants.values(), **live})

    def _input_grads(self, values: Values) -> dict[int, Tensor | None]:
        if self._sends_grads:
            return {}
        return {
            index: None if name is None else values[name]
            for index, name in self._functions.input_grads.items()
        }

    def _sums(self, results: Values) -> Values:
        return {
            accumulator(role): results[name]
            for role, name in self._functions.parameter_grads.items()
            if name in results
        }


def _border(names: Sequence[str | None], layouts: Layouts) -> Border | None:
    return Border(tuple(names), tuple(layouts.values())) if layouts else None


def _program(
    function: Function | None,
    pins: Mapping[str, xla_compat.OpSharding],
    checked: Sequence[str],
    *,
    donated: Sequence[str] = (),
    received: Border | None,
    sent: Border | None = None,
    wanted: set[str | None] | None = None,
) -> Program | None:
    """Make a program unless there is nothing for it to do."""
    if function is None and sent is None:
        return None
    return Program(
        function or _nothing(),
        pins,
        checked,
        donated=donated,
        received=received,
        sent=sent,
        wanted=None if wanted is None else {n for n in wanted if n is not None},
    )


def _nothing() -> Function:
    """Return a function that computes nothing, for a program that only sends."""
    graph = fx.Graph()
    graph.output(())
    module = fx.GraphModule(nn.Module(), graph)
    return Function(name="backward", module=module, inputs=(), outputs=())


def _reads(program: Program | None) -> set[str]:
    return set() if program is None else set(program.inputs)


def _pins(
    functions: StageFunctions,
    output_shardings: Sequence[xla_compat.OpSharding],
    input_shardings: Sequence[xla_compat.OpSharding],
    fixed_shardings: Mapping[str, xla_compat.OpSharding],
) -> dict[str, xla_compat.OpSharding]:
    """Return the sharding of every output that crosses the stage's border."""
    pins = dict(zip(functions.outputs, output_shardings, strict=True))
    for index, name in functions.input_grads.items():
        if name is not None:
            pins[name] = input_shardings[index]
    for role, name in functions.parameter_grads.items():
        pins[name] = fixed_shardings[role]
    for role, name in functions.buffer_updates.items():
        pins[name] = fixed_shardings[role]
    return pins
