"""A pipeline inside one SPMD program, for equal stages.

The weights of all stages are stacked along a dimension that is split over a mesh axis,
and so is a buffer with one microbatch for each stage. One iteration applies every stage
to its part of the buffer and shifts the buffer by one stage, by a collective-permute
between devices. With R repeats the layers are cut into R * S groups, stage s has groups
s, S + s, 2S + s, …, and a microbatch goes R times around.

Its limits are why the rest of this package exists: stages must be equal, the order is
GPipe's, in which all microbatches are live until the backward, and devices also compute
in the bubble, on values that are not used.

Source: Xu et al., GSPMD (2021), section 3.3, and the circular pipelines of praxis and
MaxText.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torch_xla_pp.graph import mapped_as, shard
from torch_xla_pp.mesh import AxisRules, LogicalAxes

AXIS = "stage"


class SpmdPipeline(nn.Module):
    """Equal layers, applied one after the other on devices side by side.

    See `spmd_pipeline`.

    Args:
        layers: The layers, in order.
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.
        num_repeats: How often a microbatch passes all stages.
        axes: Logical axes of the layers' inputs and outputs.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        num_stages: int,
        num_microbatches: int,
        num_repeats: int,
        axes: LogicalAxes,
    ) -> None:
        super().__init__()
        self._axes = axes
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.num_repeats = num_repeats
        # Its parameters and buffers are those of all layers, (S, R, layers, …).
        self.layers = copy.deepcopy(layers[0])
        self._depth = len(layers) // (num_stages * num_repeats)
        states = [layer.state_dict(keep_vars=True) for layer in layers]
        for name, first in states[0].items():
            stacked = self._stack([state[name].detach() for state in states])
            path, _, leaf = name.rpartition(".")
            owner = self.layers.get_submodule(path)
            if isinstance(first, nn.Parameter):
                value = nn.Parameter(stacked, requires_grad=first.requires_grad)
                setattr(owner, leaf, value)
            else:
                owner.register_buffer(leaf, stacked)

    def _stack(self, values: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(values))
        shape = (self.num_repeats, self.num_stages, self._depth, *values[0].shape)
        return stacked.reshape(shape).transpose(0, 1).clone()

    def axis_rules(self, axis: str) -> AxisRules:
        """Return rules that split the stages over an axis of the mesh.

        Rules for what is inside a layer are added with `|`; its parameters have
        three more dimensions in front: the stage, the repeat, the layer of the stage.
        """
        return AxisRules(
            axes={AXIS: axis},
            parameters={
                f"*{name}": (AXIS, *[None] * (value.dim() - 1))
                for name, value in self.state_dict(keep_vars=True).items()
            },
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers.

        Args:
            x: The batch, `(num_microbatches * B, …)`.

        Raises:
            ValueError: The batch cannot be cut into microbatches.
        """
        count = self.num_microbatches
        if x.shape[0] % count:
            raise ValueError(
                f"spmd_pipeline: expected a batch that {count} microbatches divide, "
                f"got {x.shape[0]} rows. Pass another batch or num_microbatches."
            )
        # Rows on one device stay there if each microbatch has some of them.
        microbatches = x.reshape(-1, count, *x.shape[1:]).transpose(0, 1)
        # Every stage has the batch; the first one takes from it.
        entries = microbatches.unsqueeze(1).expand(-1, self.num_stages, *[-1] * x.dim())
        entries = self._split(entries, num_leading=1)
        stage = torch.arange(self.num_stages, device=x.device)
        is_first = _column(stage == 0, entries.dim() - 1)
        # Stages begin with rows of the batch, on which layers are sure to be finite.
        state = entries[0]
        shifted: list[Tensor] = []
        outputs: list[Tensor] = []
        rounds = count * self.num_repeats
        for time in range(rounds + self.num_stages - 1):
            if time < rounds:
                entry = self._entry(time, entries, shifted)
                state = torch.where(is_first, entry, state)
            state = self._run_stages(self._weights(time, stage), self._split(state))
            if time >= rounds - count + self.num_stages - 1:
                outputs.append(state)
            state = self._split(_shift(state))
            shifted.append(state)
        is_last = _column(stage == self.num_stages - 1, entries.dim() - 1)
        results = torch.stack(outputs)
        return torch.where(is_last, results, 0).sum(1).transpose(0, 1).flatten(0, 1)

    def _split(self, value: Tensor, num_leading: int = 0) -> Tensor:
        """Shard a buffer, `(S, B, …)` after `num_leading` dimensions that are whole."""
        axes = self._axes or (None,) * (value.dim() - 1 - num_leading)
        return shard(value, *[None] * num_leading, AXIS, *axes)

    def _entry(self, time: int, entries: Tensor, shifted: Sequence[Tensor]) -> Tensor:
        """Return the first stage's input, in the first of the buffer's places."""
        count = self.num_microbatches
        if time < count:
            return entries[time]
        return shifted[time - count + self.num_stages - 1]

    def _weights(self, time: int, stage: Tensor) -> Mapping[str, Tensor]:
        """Return the weights that each stage uses now, `(S, layers, …)`.

        Stage s is in repeat `(time - s) // num_microbatches`: stages are in the same
        one or, up to some stage, in the next.
        """
        count = self.num_microbatches
        state = self.layers.state_dict(keep_vars=True)
        repeat = min(time // count, self.num_repeats - 1)
        reached = time - repeat * count
        if repeat == 0 or reached >= self.num_stages - 1:
            return {name: value[:, repeat] for name, value in state.items()}
        is_there = stage <= reached
        return {
            name: torch.where(
                _column(is_there, value.dim() - 1),
                value[:, repeat],
                value[:, repeat - 1],
            )
            for name, value in state.items()
        }

    def _run_stages(self, weights: Mapping[str, Tensor], state: Tensor) -> Tensor:
        with mapped_as(AXIS):
            return torch.vmap(self._stage, randomness="different")(weights, state)  # type: ignore[no-any-return]

    def _stage(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        for index in range(self._depth):
            one = {name: value[index] for name, value in weights.items()}
            x = functional_call(self.layers, one, (x,))
        return x


def spmd_pipeline(
    layers: Sequence[nn.Module],
    *,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int = 1,
    axes: LogicalAxes = (),
) -> SpmdPipeline:
    """Make a pipeline inside one SPMD program out of equal layers.

    The result is a module like `nn.Sequential(*layers)`. As a stage, or as a part of
    one, its stages run on different devices of the rank. Compare it with a pipeline
    over ranks before you choose it: benchmarks/spmd_pipeline.py.

    Args:
        layers: Modules of one structure, each of which maps a tensor to a tensor of the
            same shape. They must not change their buffers.
        num_stages: Size of the mesh axis over which the layers are split.
        num_microbatches: The number of microbatches of a batch.
        num_repeats: How often a microbatch passes all stages: 1 for GPipe's order, more
            for a circular pipeline, with a smaller bubble:
            `(num_stages - 1) / (num_repeats * num_microbatches + num_stages - 1)`.
        axes: Logical axes of the layers' inputs and outputs, e.g. `("batch",
            "sequence", "embed")`; by default all devices of a stage have them whole.

    Raises:
        ValueError: The layers differ, or a number does not fit.

    Example:
        >>> blocks = spmd_pipeline(blocks, num_stages=2, num_microbatches=8)
        >>> stage = PipelineStage(
        ...     blocks, 0, 1, xpp.device(), mesh=mesh["stage"],
        ...     sharding=blocks.axis_rules("stage"), batch_axis=None)
    """
    faults = _faults(layers, num_stages, num_microbatches, num_repeats)
    if faults:
        raise ValueError("\n".join(f"spmd_pipeline: {fault}" for fault in faults))
    return SpmdPipeline(layers, num_stages, num_microbatches, num_repeats, axes)


def _faults(
    layers: Sequence[nn.Module],
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
) -> list[str]:
    if min(num_stages, num_microbatches, num_repeats) < 1:
        return [
            f"expected positive numbers, got {num_stages=}, {num_microbatches=}, "
            f"{num_repeats=}."
        ]
    faults = []
    if not layers or len(layers) % (num_stages * num_repeats):
        faults.append(
            f"expected a multiple of {num_stages} stages x {num_repeats} repeats as "
            f"number of layers, got {len(layers)}. Choose other numbers."
        )
    if num_repeats > 1 and num_microbatches < num_stages:
        faults.append(
            f"expected at least {num_stages} microbatches for {num_stages} stages with "
            f"{num_repeats} repeats, got {num_microbatches}. Choose other numbers."
        )
    shapes = [_shapes(layer) for layer in layers]
    for index, found in enumerate(shapes):
        differing = sorted(
            name
            for name in {*found, *shapes[0]}
            if found.get(name) != shapes[0].get(name)
        )
        faults += [
            f"expected {name} of layer {index} to be as in layer 0, "
            f"{shapes[0].get(name, 'absent')}, got {found.get(name, 'absent')}. "
            "Layers must be equal."
            for name in differing
        ]
    return faults


def _shapes(layer: nn.Module) -> dict[str, str]:
    return {
        name: f"{list(value.shape)} {value.dtype}"
        for name, value in layer.state_dict(keep_vars=True).items()
    }


class _Shift(torch.autograd.Function):
    """A shift of each stage's part to the next one, the last one's to the first.

    XLA compiles such a `cat` to one collective-permute; it compiles torch_xla's `roll`
    to a gather, and the derivative of `cat` to three permutes.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        return torch.cat([state[-1:], state[:-1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad[1:], grad[:1]])


def _shift(state: Tensor) -> Tensor:
    return _Shift.apply(state)  # type: ignore[no-any-return, no-untyped-call]


def _column(mask: Tensor, num_dims: int) -> Tensor:
    """Reshape a mask over stages to broadcast over values of `num_dims` dimensions."""
    return mask.reshape(-1, *[1] * (num_dims - 1))
