"""The purposes of a mesh's axes, by the logical axes that rules split over them."""

from torch_xla_pp.mesh.axis_rules import AxisRules
from torch_xla_pp.mesh.local_mesh import axis_names


def strategy_names(rules: AxisRules | None) -> dict[str, str]:
    """Return the strategy of each mesh axis that rules name.

    Args:
        rules: Axis rules with the logical axes of the presets.

    Returns:
        Mesh axis → "ep", "tp", "tensor_sequence", "sp", "cp", "fsdp", "fsdp_once" if
        weights are gathered once a step, or "dp"; axes of other rules are left out.
    """
    if rules is None:
        return {}
    used: dict[str, set[str]] = {}
    kept: dict[str, set[str]] = {}
    for table, found in ((rules.axes, used), (rules.parameter_axes, kept)):
        for logical, axis in table.items():
            for name in axis_names(axis):
                found.setdefault(name, set()).add(logical)
    named = {}
    for axis in {**used, **kept}:
        name = _name_of(used.get(axis, set()), kept.get(axis, set()))
        if name == "fsdp" and rules.gather_once:
            name = "fsdp_once"
        if name:
            named[axis] = name
    return named


def _name_of(used: set[str], kept: set[str]) -> str:
    """Return a strategy, by the axes that are split in use and for parameters."""
    if "expert" in used:
        return "ep"
    if used & {"mlp", "embed"}:
        return "tensor_sequence" if "norm_sequence" in used else "tp"
    if "heads" in used:
        return "sp" if "norm_sequence" in used else "tp"
    if used & {"sequence", "norm_sequence"}:
        return "cp"
    if kept:
        return "fsdp"
    return "dp" if "batch" in used else ""
