"""What ranks on CPU devices do differently: all of it is here, and nothing elsewhere.

Three things, for speed, and so that programs never deadlock:

* XLA's client gets enough threads, and no XNNPACK (`client`)
* malloc keeps what is freed (`heap`)
* programs for one device multiply matrices with PyTorch's library (`products`)

On other kinds of devices none of it is done, and no variable or flag is set for it.
"""

from torch_xla_pp.cpu.client import (
    copying_large_values,
    give_back_garbage,
    most_small_bytes,
    prepare_client,
    starting,
)
from torch_xla_pp.cpu.products import library_product

__all__ = [
    "copying_large_values",
    "give_back_garbage",
    "library_product",
    "most_small_bytes",
    "prepare_client",
    "starting",
]
