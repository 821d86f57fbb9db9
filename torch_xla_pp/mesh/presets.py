"""Tables of axes for the usual ways to shard: `AxisRules` without patterns.

All presets use the same logical axes, so that a model that uses these names is sharded
in another way by another preset:

* `batch`; `sequence` in attention's queries and in the MLP; `norm_sequence`, the same
  dimension between the blocks, where norms and residual sums are; `key_sequence`, the
  same of attention's keys and values; `expert`
* `embed`, the width of the residual stream; `mlp`, the hidden width of the MLP; `heads`
  and `kv_heads` of attention (for weights: these times the width of a head);
  `head_dim`; `vocab`

A preset names mesh axes in its arguments. Patterns and further names are added with
`|`, and two presets are used at once with `mix`:

    rules = mix(fsdp("data"), tp("model")) | AxisRules(parameters={...})

Below, "expect" lists the collectives that XLA puts into the programs of a stage with an
attention and an MLP block whose weights have two dimensions. Where two ways cost the
same, XLA may choose the other one: `stage.explain()` shows its choice.

Source: the presets of MaxText's guide to sharding, https://maxtext.readthedocs.io.
"""

from torch_xla_pp.mesh.axis_rules import AxisRules, axis_of
from torch_xla_pp.mesh.local_mesh import Axis, axis_names

LOGICAL_AXES = (
    "batch",
    "sequence",
    "norm_sequence",
    "key_sequence",
    "expert",
    "embed",
    "mlp",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
)


def dp(axis: Axis = "data") -> AxisRules:
    """Split the batch; every device has all weights.

    Expect: no collective in a forward and a backward; an all-reduce per weight, once
    per step.
    """
    return _rules(axis, ("batch",))


def fsdp(axis: Axis = "data", *, gather_once: bool = False) -> AxisRules:
    """Split the batch, and weights along `embed`.

    Expect: an all-gather per weight where it is used, in forward and backward; a
    reduce-scatter (on CPU devices an all-reduce and a slice) per gradient. With
    `gather_once` all of these once per step, and none per microbatch.

    Args:
        axis: The mesh axis.
        gather_once: As in `AxisRules`.
    """
    return _rules(axis, ("batch",), ("embed",), gather_once=gather_once)


def fsdp_transpose(axis: Axis = "data", *, gather_once: bool = False) -> AxisRules:
    """Split the batch, and weights along the dimensions other than `embed`.

    Expect: as for `fsdp`, on the other dimension. Mixed with `fsdp` over another axis
    it splits weights in both dimensions.

    Args:
        axis: The mesh axis.
        gather_once: As in `AxisRules`.
    """
    weights = ("mlp", "heads", "kv_heads", "vocab")
    return _rules(axis, ("batch",), weights, gather_once=gather_once)


def tp(axis: Axis = "model") -> AxisRules:
    """Split heads, the MLP's hidden width and the vocabulary.

    Expect: one all-reduce of an activation at the end of attention and of the MLP in a
    forward, and at their beginning in a backward.
    """
    return _rules(axis, ("mlp", "heads", "kv_heads", "vocab"))


def tp_transpose(axis: Axis = "model") -> AxisRules:
    """Split the width of the residual stream, of activations and weights.

    Expect: an all-reduce after each product that reads the residual stream, and small
    ones in norms; in a backward also gathers of activations. For models whose `embed`
    is larger than their `mlp`.
    """
    return _rules(axis, ("embed",))


def tensor_sequence(axis: Axis = "model") -> AxisRules:
    """Split as `tp`, and the sequence between the blocks over the same axis.

    Expect: in place of each all-reduce of `tp` an all-gather before and a
    reduce-scatter (on CPU devices an all-reduce and a slice) after the block.
    """
    return _rules(axis, ("mlp", "heads", "kv_heads", "vocab", "norm_sequence"))


def cp(axis: Axis = "context") -> AxisRules:
    """Split the sequence everywhere but in keys and values.

    Expect: an all-gather of keys and of values in a forward, and a sum of their
    gradients and of each weight's in a backward. Under a causal mask later devices have
    more work: `striped_positions` is an order of the sequence that balances it.
    """
    return _rules(axis, ("sequence", "norm_sequence"))


def sp(axis: Axis = "sequence") -> AxisRules:
    """Split heads inside attention and the sequence everywhere else.

    A model marks where attention begins and ends: its queries, keys and values have
    `("batch", None, "heads", "head_dim")`, all other activations have `norm_sequence`.

    Expect: an all-to-all (or a gather and a slice) on the way into attention and out
    of it; an all-reduce per weight in a backward.
    """
    rules = _rules(axis, ("norm_sequence", "heads", "kv_heads"))
    return rules | AxisRules(parameter_axes={"heads": None, "kv_heads": None})


def ep(axis: Axis = "expert") -> AxisRules:
    """Split the experts, and the batch outside of them, over the same axis.

    Expect: an all-to-all (or a gather and a slice) of tokens to the experts and back;
    an all-reduce per weight outside of the experts, once per step.
    """
    return _rules(axis, ("expert", "batch"))


def mix(*presets: AxisRules) -> AxisRules:
    """Use several presets at once, each over mesh axes of its own.

    A logical axis that several presets split is split over the axes of all of them,
    those of the first preset outermost.

    Args:
        *presets: The presets to join; their patterns are joined as by `|`.

    Raises:
        ValueError: Two presets split one logical axis over the same mesh axis.

    Example:
        >>> mix(fsdp("data"), tp("model")).partition(("mlp", "embed"), (8, 8), mesh,
        ...                                          is_parameter=True)
        (('model', 'data'), [])
    """
    names = [name for rules in presets for name in rules.axes]
    axes = {name: _joined(name, presets, is_parameter=False) for name in names}
    names += [name for rules in presets for name in rules.parameter_axes]
    of_parameters = {name: _joined(name, presets, is_parameter=True) for name in names}
    joined = AxisRules(
        axes=axes,
        parameter_axes={
            name: axis
            for name, axis in of_parameters.items()
            if name not in axes or axis != axes[name]
        },
    )
    for rules in presets:
        joined |= AxisRules(
            parameters=rules.parameters,
            activations=rules.activations,
            gather_once=rules.gather_once,
        )
    return joined


def _joined(name: str, presets: tuple[AxisRules, ...], *, is_parameter: bool) -> Axis:
    found: list[str] = []
    for rules in presets:
        table = {**rules.axes, **(rules.parameter_axes if is_parameter else {})}
        for axis in axis_names(table.get(name)):
            if axis in found:
                raise ValueError(
                    f"mix: expected presets over different mesh axes, got {axis!r} "
                    f"twice for {name!r}. Name another axis in one of the presets."
                )
            found.append(axis)
    return axis_of(found)


def _rules(
    axis: Axis,
    names: tuple[str, ...],
    of_parameters: tuple[str, ...] = (),
    *,
    gather_once: bool = False,
) -> AxisRules:
    """Split `names` over a mesh axis, and `of_parameters` for parameters alone."""
    whole: dict[str, Axis] = dict.fromkeys(LOGICAL_AXES)
    return AxisRules(
        axes={**whole, **dict.fromkeys(names, axis)},
        parameter_axes=dict.fromkeys(of_parameters, axis),
        gather_once=gather_once,
    )
