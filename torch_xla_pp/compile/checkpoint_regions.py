"""Functions under `torch.utils.checkpoint.checkpoint`, marked on the nodes of a trace.

They are traced like all other functions. A *region* is all that one outermost call of
`checkpoint` runs. This is the only file that uses the insides of
`torch.utils.checkpoint`.

Differences to eager: a region under `use_reentrant=True` has gradients even if none of
its arguments has; buffers are not updated a second time in the backward; and
`context_fn` must return the contexts that `create_selective_checkpoint_contexts` makes.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch.fx import traceback
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.graph import replaced

# Fields of `node.meta` that torch.compile has for the same purpose: they are copied
# from one trace to the next.
REGION = "ac_graph_id"
_POLICY = "recompute"


@contextlib.contextmanager
def marking_checkpoints() -> Iterator[None]:
    """Let traces inside the context mark checkpointed functions on their nodes.

    `export_joint` enters it itself; enter it around `torch.export` of a module, too,
    so that the nodes of the exported graph have the marks.

    Upstream makes such marks for torch.compile alone: its tracer turns a checkpointed
    function into a `TagActivationCheckpoint`.

    Raises:
        PipelineError: A trace meets a `checkpoint` whose `context_fn` is not
            supported.
    """
    count = itertools.count()

    def without_reentrant(
        function: Any,
        preserve_rng_state: bool,
        context_fn: Callable[[], tuple[Any, Any]],
        *_: Any,
        **__: Any,
    ) -> Iterator[None]:
        with _region(count), _selection(context_fn):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            with _region(count):
                return function(*args)

    def inline(_: Any, body: fx.GraphModule, *args: Any, **__: Any) -> Any:
        if "_checkpoint_context_fn" in body.meta:
            raise _unsupported_context("a context_fn in a model that is exported")
        with _region(count) as region:
            for node in body.graph.nodes:
                node.meta[REGION] = region
            return fx.Interpreter(body).run(*args)

    name = "_checkpoint_without_reentrant_generator"
    with (
        replaced(torch_checkpoint, name, without_reentrant),
        replaced(torch_checkpoint, "CheckpointFunction", Reentrant),
        # What torch.export makes of a call of `checkpoint`, and then cannot export.
        replaced(TagActivationCheckpoint, "__call__", inline),
    ):
        yield


@contextlib.contextmanager
def _region(count: Iterator[int]) -> Iterator[int]:
    """Mark the nodes made inside; an outer region goes on."""
    before = dict(traceback.current_meta)
    region: int = traceback.current_meta.setdefault(REGION, next(count))
    try:
        yield region
    finally:
        for key in (REGION, _POLICY):
            traceback.current_meta.pop(key, None)
            if key in before:
                traceback.current_meta[key] = before[key]


def _selection(context_fn: Callable[[], tuple[Any, Any]]) -> Any:
    """Return the context that marks nodes with a selective checkpoint's policy."""
    context, _ = context_fn()
    known = (contextlib.nullcontext, torch_checkpoint._CachingTorchDispatchMode)
    if not isinstance(context, known):
        raise _unsupported_context(f"a context of type {type(context).__name__}")
    return context


def _unsupported_context(got: str) -> PipelineError:
    return PipelineError(
        "checkpoint: expected a context_fn that returns what "
        "create_selective_checkpoint_contexts returns, in a model that is not "
        f"exported, got {got}. Leave context_fn out, or build the stage by hand."
    )


def read_regions(joint: JointGraph) -> None:
    """Sort the nodes by region.

    A node of the backward has the sequence number of its operation, as has the
    first node that the operation has in the forward.
    """
    region_of: dict[int, int | None] = {}
    for node in joint.graph.graph.nodes:
        number, region = node.meta.get("seq_nr"), node.meta.get(REGION)
        if node.meta.get("partitioner_tag") == "is_backward":
            region = region_of.get(number)
        elif number is not None:
            region_of.setdefault(number, region)
        if region is not None:
            joint.regions[node] = region
        policy = node.meta.get(_POLICY)
        if policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            joint.selected.add(node)
