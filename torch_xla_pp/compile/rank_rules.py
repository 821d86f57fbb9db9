"""The rules by which a rank's programs run operations, chosen by its devices."""

from torch_xla_pp import cpu
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.product_rules import Constraints, LibraryProducts
from torch_xla_pp.world import World


def is_constrained(world: World) -> bool:
    """Return whether axis rules matter while programs run.

    They do not on one device that multiplies with PyTorch's library: it has all of
    every value.
    """
    return world.rules is not None and cpu.library_product() is None


def rules_of(world: World) -> tuple[LoweringRule, ...]:
    """Return the rules by which a rank's programs run operations."""
    multiply = cpu.library_product()
    if multiply is not None:
        return (LibraryProducts(multiply=multiply),)
    return (Constraints(layout=world.constraint),) if is_constrained(world) else ()
