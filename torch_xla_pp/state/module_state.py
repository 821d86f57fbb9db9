"""The parameters, buffers and gradients of one stage, on the device.

Law: a step starts with device data only. Whatever the user did lazily between two steps
(an optimizer step, gradient clipping, loading weights) is computed by one program at
the start of the next step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import (
    BoundValues,
    Program,
    buffer_role,
    device_bytes,
    is_buffer,
    is_constrained,
    name_in_module,
    parameter_role,
)
from torch_xla_pp.deferred import (
    PARAMETER,
    TensorPlace,
    lacking,
    places_of,
    record_resets,
    shapes_of,
    state_in,
    state_of,
    unwritten,
    value_of,
)
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.hlo import OpShardingArgs, parse_sharding
from torch_xla_pp.mesh import (
    Partition,
    Sharding,
    assign_partitions,
    noted_partition,
)
from torch_xla_pp.state.gathered_weights import GatheredWeights
from torch_xla_pp.state.pending_updates import compute_updates
from torch_xla_pp.torch_compat import take_value
from torch_xla_pp.world import World

_REPLICATED = "{replicated}"


class ModuleState:
    """The values of a stage's module, on the devices of its rank.

    Args:
        module: The stage's module, on the host, on meta, or on the XLA device; moved
            in place. Parameters that are shared inside the module stay shared.
        world: The devices of this rank.
        sharding: Shardings of parameters, see `mesh.assign_partitions`.
        whole_model: Name → shape of what all stages have, None if that is not known.

    Raises:
        ValueError: A rule does not fit a parameter.

    Attributes:
        copies: Roles of the parameters that an earlier stage has, too.
        fixed: All values by role.
        gathered: Copies of weights that a step makes once.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        sharding: Sharding,
        whole_model: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        compute_updates()
        self._module = module
        self._world = world
        self._texts: dict[str, str] = {}
        self._before: dict[str, Tensor] = {}
        self._bound: BoundValues | None = None
        self.copies: set[str] = set()
        self.fixed: dict[str, Tensor] = {}
        self._partitions = _noted(module, world) | assign_partitions(
            sharding, shapes_of(module), world.local, whole_model=whole_model
        )
        record_resets(module)
        _unwrap(module)
        self._unloaded = set(unwritten(module))
        self._move(places_of(module))
        self._states = {p.name: _version_of(p.tensor) for p in state_of(module)}
        # Weights that are used in another layout: copied once a step, or each time.
        used = self._used_partitions()
        is_once = world.rules is not None and world.rules.gather_once
        self._used_once = used if is_once else {}
        self._used_each_time = {} if is_once else used
        self.gathered = GatheredWeights(self._shardings(self._used_once))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of parameters and buffers on one device.

        Copies that the last step gathered are included.
        """
        return sum(device_bytes([*self.fixed.values()])) + self.gathered.num_bytes

    def shardings(self) -> dict[str, xla_compat.OpSharding]:
        """Return the sharding of every parameter and buffer, by role."""
        return {r: xla_compat.sharding_of(value) for r, value in self.fixed.items()}

    def used_shardings(self) -> dict[str, xla_compat.OpSharding]:
        """Return shardings of weights in use, where they are kept in others."""
        used = self._used_each_time if is_constrained(self._world) else {}
        return self._shardings(used)

    def layouts(self) -> dict[str, tuple[OpShardingArgs, int]]:
        """Return shardings of parameters as programs get them, and their dimensions."""
        gathered = self._used_once
        texts = xla_compat.sharding_texts([*self.fixed.values()])
        return {
            role: (
                self._world.sharding_args(gathered[role])
                if role in gathered
                else parse_sharding(text),
                value.dim(),
            )
            for (role, value), text in zip(self.fixed.items(), texts, strict=True)
        }

    @property
    def programs(self) -> dict[str, Program]:
        """Return the programs that have run so far, by what they do."""
        program = self.gathered.program
        is_known = program is not None and program.is_compiled
        return {"gathering of weights": program} if is_known and program else {}

    def values(self) -> BoundValues:
        """Return all values by role, as programs get them."""
        if self._bound is None:
            self._bound = BoundValues(self.gathered.values(self.fixed))
        return self._bound

    def begin_step(self) -> None:
        """Bring all values onto the device, and keep buffers for `roll_back`.

        Raises:
            PipelineError: A parameter or buffer has no value yet, or was resharded
                after its first use.
        """
        places = places_of(self._module)
        held = state_in(places)
        _refuse_wrapped(held)
        self._check_loaded(held)
        self._move(places)
        self.fixed = {_role(place): place.tensor for place in held}
        values = list(self.fixed.values())
        values += [v.grad for v in values if v.grad is not None]
        if any(xla_compat.are_pending(values)):
            xla_compat.sync_all()
            xla_compat.materialize(values)
        self._check_shardings()
        self._drop_copies()
        self._before = {r: v for r, v in self.fixed.items() if is_buffer(r)}

    def roll_back(self) -> None:
        """Undo a failed step's changes of buffers; it has not changed gradients."""
        self.update_buffers(self._before)
        self._drop_copies()

    def end_step(self) -> None:
        """Keep the step's changes: from now on there is nothing to roll back."""
        self._drop_copies()
        self._before = {}

    def update_buffers(self, updates: Mapping[str, Tensor]) -> None:
        """Replace buffers by the values that a forward computed."""
        for role, value in updates.items():
            path, _, key = name_in_module(role).rpartition(".")
            self._module.get_submodule(path)._buffers[key] = value
            self.fixed[role] = value
            self._bound = None

    def _drop_copies(self) -> None:
        """Drop what was made or found for the programs of one step."""
        self.gathered.drop()
        self._bound = None

    def _used_partitions(self) -> dict[str, Partition]:
        """Return the partitions of weights in use, where they are kept in others."""
        rules = self._world.rules
        if rules is None:
            return {}
        names = [name for name, _ in self._module.named_parameters()]
        used = rules.used(names, self._partitions)
        return {parameter_role(name): partition for name, partition in used.items()}

    def _shardings(
        self, partitions: Mapping[str, Partition]
    ) -> dict[str, xla_compat.OpSharding]:
        return {r: self._world.sharding(p) for r, p in partitions.items()}

    def grads(self) -> dict[str, Tensor]:
        """Return the gradients that parameters have, sharded like them.

        Gradients of `copies` are left out, as their owner has them.
        """
        found = {
            role: value.grad.detach() if value.grad.requires_grad else value.grad
            for role, value in self.fixed.items()
            if value.grad is not None and role not in self.copies
        }
        held = _texts([self.fixed[role] for role in found])
        texts = zip(found, _texts([*found.values()]), held, strict=True)
        return found | {
            role: _like(found[role], self.fixed[role])
            for role, own, text in texts
            if own != text
        }

    def _move(self, places: Sequence[TensorPlace]) -> None:
        """Put every tensor that is not on the device there, keeping ties."""
        moved: dict[int, Tensor] = {}
        # One at a time: a tied parameter is on the device when it is met again.
        for place in places:
            value = place.tensor
            if value.device.type == "xla":
                continue
            if isinstance(value, nn.Parameter):
                self._move_parameter(place.name, value)
                continue
            if id(value) not in moved:
                moved[id(value)] = self._uploaded(place.name, _host_value(value))
            place.put(moved[id(value)])
        for place in places if self._partitions else ():
            if place.name not in self._partitions:
                continue
            if not xla_compat.sharding_texts([place.tensor])[0]:
                sharding = self._world.sharding(self._partitions[place.name])
                xla_compat.annotate(place.tensor, sharding)

    def _move_parameter(self, name: str, value: nn.Parameter) -> None:
        """Put a parameter on the device; it stays the object that optimizers know.

        The host holds one value at a time of those that are computed here.
        """
        grad = value.grad
        take_value(value, self._uploaded(name, _host_value(value)))
        if grad is not None:
            value.grad = self._uploaded(name, grad)

    def _uploaded(self, name: str, value: Tensor) -> Tensor:
        """Return a value on the device; the user may still shard it if no rule does."""
        if name in self._partitions:
            return self._world.upload(value, self._partitions[name])
        data = self._world.upload(value, (None,) * value.dim())
        xla_compat.forget_sharding(data)
        return data

    def _check_loaded(self, held: Sequence[TensorPlace]) -> None:
        """Refuse to run with tensors on meta that have no values."""
        self._unloaded = {
            place.name
            for place in held
            if place.name in self._unloaded
            and _version_of(place.tensor) == self._states[place.name]
        }
        if self._unloaded:
            raise PipelineError(
                f"stage: {lacking(sorted(self._unloaded))}; or load values before "
                "the first step, e.g. with stage.submod.load_state_dict(state, "
                "strict=False), and fill buffers that no state dict has."
            )

    def _check_shardings(self) -> None:
        """Annotate values; refuse shardings that changed since the first step."""
        # On one device they are whole without: annotations move them to the host.
        is_one = self._world.local.num_devices == 1
        texts_of = _texts if is_one else xla_compat.sharding_texts
        found = texts_of([*self.fixed.values()])
        texts = dict(zip(self.fixed, found, strict=True))
        if texts == self._texts:
            return
        for role in [role for role, text in texts.items() if not text]:
            xla_compat.annotate(self.fixed[role], xla_compat.replicated_sharding())
            texts[role] = _REPLICATED
        changed = [
            f"{role}: expected {self._texts[role]}, got {text}"
            for role, text in texts.items()
            if self._texts.get(role, text) != text
        ]
        if changed:
            raise PipelineError(
                "stage: the sharding of parameters changed after the first step. "
                f"{'; '.join(changed)}. Shard them before it."
            )
        self._texts = texts


def _noted(module: nn.Module, world: World) -> dict[str, Partition]:
    """Return the partitions that were noted on parameters and buffers.

    Raises:
        ValueError: One does not fit the mesh; all faults are listed, one a line.
    """
    found: dict[str, Partition] = {}
    faults = []
    for place in places_of(module):
        partition = noted_partition(place.tensor)
        if partition is not None:
            found[place.name] = partition
            faults += [
                f"{place.name}: {partition}: {fault}"
                for fault in world.local.faults(tuple(place.tensor.shape), partition)
            ]
    if faults:
        raise ValueError(
            "distribute_tensor: expected placements on axes of the stage's mesh that "
            "divide the dimensions, got others. Correct these:\n  "
            + "\n  ".join(faults)
        )
    return found


def _unwrap(module: nn.Module) -> None:
    """Replace what torch_xla's `distribute_tensor` returned by the sharded tensors."""
    plain: dict[int, nn.Parameter] = {}
    for place in places_of(module):
        value = place.tensor
        if not xla_compat.is_wrapped(value):
            continue
        data = xla_compat.unwrapped(value)
        if place.holding == PARAMETER:
            own = nn.Parameter(data.detach(), value.requires_grad)
            data = plain.setdefault(id(value), own)
        place.put(data)


def _refuse_wrapped(held: Sequence[TensorPlace]) -> None:
    """Refuse tensors wrapped after the stage was made: an optimizer may hold them."""
    wrapped = [place.name for place in held if xla_compat.is_wrapped(place.tensor)]
    if wrapped:
        raise PipelineError(
            f"stage: expected plain tensors, got XLAShardedTensor for "
            f"{', '.join(wrapped)}. Call distribute_tensor(parameter, ...) and leave "
            "what it returns, which shards the parameter in place, or distribute the "
            "module before its stage is made."
        )


def _like(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of `grad` with the sharding of `parameter`."""
    grad = grad.clone()
    xla_compat.annotate(grad, xla_compat.sharding_of(parameter))
    xla_compat.materialize([grad])
    return grad


def _texts(tensors: list[Tensor]) -> list[str]:
    return [text or _REPLICATED for text in xla_compat.sharding_texts(tensors)]


def _role(place: TensorPlace) -> str:
    """Return the role in the joint graph of the tensor in a place."""
    is_kept = place.holding == PARAMETER
    return parameter_role(place.name) if is_kept else buffer_role(place.name)


def _host_value(value: Tensor) -> Tensor:
    """Return the value of a tensor; zeros until it is loaded, if it has none."""
    if not value.is_meta:
        return value.detach()
    made = value_of(value)
    return torch.zeros_like(value, device="cpu") if made is None else made


def _version_of(value: Tensor) -> tuple[int, int]:
    """Return a key that changes when a tensor is written to or replaced."""
    return id(value), value._version
