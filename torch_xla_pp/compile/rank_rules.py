"""The rules by which a rank's programs run operations, chosen by its devices."""

from collections.abc import Callable, Iterable, Mapping

from torch_xla_pp import cpu, env
from torch_xla_pp.compile.attention_calls import has_call, run_attention
from torch_xla_pp.compile.attention_kernel import AttentionKernel, calls_kernel
from torch_xla_pp.compile.gelu_rules import run_gelu
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.mesh_parts import MeshParts, ValueParts
from torch_xla_pp.compile.norm_rules import run_norms
from torch_xla_pp.compile.part_calls import PartCalls, part_results
from torch_xla_pp.compile.product_rules import Constraints, LibraryProducts
from torch_xla_pp.compile.row_rules import run_on_rows
from torch_xla_pp.compile.sharded_products import ShardedProducts
from torch_xla_pp.compile.view_rules import copy_views
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD
from torch_xla_pp.mesh import LogicalAxes, Partition, is_on_mesh
from torch_xla_pp.world import World

_LOOPS: tuple[LoweringRule, ...] = (run_norms, run_on_rows, run_gelu, copy_views)


def is_constrained(world: World) -> bool:
    """Return whether axis rules matter while programs run.

    They do not on one device that multiplies by a library: it holds every value whole.
    """
    return world.rules is not None and _library_product() is None


def rules_of(
    world: World, named: Iterable[LogicalAxes] = ()
) -> tuple[LoweringRule, ...]:
    """Return the rules by which a rank's programs run operations.

    Args:
        world: Its devices.
        named: The axes that `shard` was called with; without axis rules, those that are
            axes of the mesh count.
    """
    if _library_product() is not None:
        return library_rules()
    is_split = is_constrained(world) or any(map(is_on_mesh, named))
    needs_rule = is_split or _calls_on_parts()
    others = (*library_rules(), *_kernels(world))
    if not needs_rule:
        return others
    products = _sharded_products(world)
    constraints = Constraints(layout=world.constraint, products=products)
    return (*others, *_part_calls(world), constraints)


def _calls_on_parts() -> bool:
    """Return whether programs call libraries for each device's parts."""
    return env.device_kind() == "CPU" and cpu.has_ops_of_parts()


def kept_attention(world: World) -> Callable[..., bool]:
    """Return what tells whether attention stays one operation in a joint graph.

    It takes the arguments of the operation, or of its gradient.
    """
    kernels = _kernels(world)
    return kernels[0].takes if kernels else has_call


def can_call_attention(
    world: World,
    joint: JointGraph,
    inputs: Callable[[], Mapping[str, Partition | None]],
) -> bool:
    """Return whether programs can call all that a joint graph has of attention.

    Args:
        world: The devices of the rank.
        joint: The graph.
        inputs: Returns role → how a value is split, None if that is not known.
    """
    if not _calls_on_parts():
        return True
    graph = joint.graph.graph
    ops = (ATTENTION, ATTENTION_BACKWARD)
    called = [
        node for op in ops for node in graph.find_nodes(op="call_function", target=op)
    ]
    if not called:
        return True
    parts = joint_parts(world, joint, inputs())
    return all(part_results(node, parts) is not None for node in called)


def joint_parts(
    world: World, joint: JointGraph, inputs: Mapping[str, Partition | None]
) -> ValueParts:
    """Return how the values of a joint graph are split; arguments as above."""
    mesh = _mesh_parts(world)
    known = {
        node: inputs.get(role, (None,) * node.meta["val"].dim())
        for node, role in joint.roles.items()
    }
    return ValueParts(mesh, mesh.follow(joint.graph.graph, known))


def library_rules() -> tuple[LoweringRule, ...]:
    """Return the rules by which programs for one CPU device call libraries.

    Programs for other devices have none, whatever this rank runs.
    """
    if env.device_kind() != "CPU":
        return ()
    multiply = _library_product()
    products = () if multiply is None else (_products(multiply),)
    own = _LOOPS if cpu.has_own_ops() else ()
    attention = (run_attention,) if cpu.has_attention() else ()
    return (*attention, *own, *products)


def _products(multiply: cpu.Product) -> LibraryProducts:
    return LibraryProducts(
        multiply=multiply,
        multiply_biased=cpu.multiply_biased,
        add_product=cpu.add_product,
    )


def _sharded_products(world: World) -> ShardedProducts | None:
    """Return how a library multiplies each device's parts, None for XLA's products."""
    if env.device_kind() != "CPU":
        return None
    multiply = cpu.library_product_of_parts()
    if multiply is None:
        return None
    return ShardedProducts(multiply=multiply, mesh=_mesh_parts(world))


def _part_calls(world: World) -> tuple[LoweringRule, ...]:
    """Return the rules by which each device calls libraries for its parts."""
    if not _calls_on_parts():
        return ()
    attention = (run_attention,) if cpu.has_attention_of_parts() else ()
    return (PartCalls(rules=(*attention, *_LOOPS), mesh=_mesh_parts(world)),)


def _mesh_parts(world: World) -> MeshParts:
    return MeshParts(
        local=world.local,
        layout=world.layout.constraint,
        sharding=world.sharding,
        partitions_of=world.partitions_of,
    )


def _kernels(world: World) -> tuple[AttentionKernel, ...]:
    """Return the rules by which operations call kernels of the devices."""
    if not calls_kernel():
        return ()

    def partition(axes: LogicalAxes) -> Partition:
        found = world.layout.constraint(axes)
        # Without rules only the batch is split, as the rank's inputs are.
        return found or (world.layout.batch_axis, *(None for _ in axes[1:]))

    return (AttentionKernel(partition=partition, sharding=world.sharding),)


def _library_product() -> cpu.Product | None:
    """Return the product of a library, None for programs for other devices.

    Such programs may be written here for another compiler, whatever this rank runs.
    """
    return cpu.library_product() if env.device_kind() == "CPU" else None
