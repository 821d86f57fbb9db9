"""Models without memory: built, named and filled later."""

from torch_xla_pp.deferred.deferred_init import deferred_init
from torch_xla_pp.deferred.fake import as_on_host, back_to_meta
from torch_xla_pp.deferred.materialize import (
    lacking,
    materialize,
    record_resets,
    unwritten,
)
from torch_xla_pp.deferred.module_tensors import (
    PARAMETER,
    TensorPlace,
    parameter_names,
    places_of,
    shapes_of,
    state_in,
    state_of,
)
from torch_xla_pp.deferred.recipes import record_of, share_record, value_of
from torch_xla_pp.deferred.skeleton import skeleton_of

__all__ = [
    "PARAMETER",
    "TensorPlace",
    "as_on_host",
    "back_to_meta",
    "deferred_init",
    "lacking",
    "materialize",
    "parameter_names",
    "places_of",
    "record_of",
    "record_resets",
    "shapes_of",
    "share_record",
    "skeleton_of",
    "state_in",
    "state_of",
    "unwritten",
    "value_of",
]
