"""What ranks on CPU devices do differently, all in this folder.

For speed, and so that programs never deadlock:

* XLA's client gets enough threads, and no XNNPACK (`before_client`)
* malloc keeps what is freed (`heap`), and XLA uses large blocks again (`blocks`)
* programs multiply matrices with a library (`products`, `blas`)
* programs call `csrc/` for sums, softmax and layer norm (`rows`), for GELU
  (`activations`), for copies of views (`views`), and for attention (`heads`)
* programs for one device save values in the memory of earlier ones, and are launched
  beside their caller (`client`)

None of it is done on other kinds of devices, and no variable or flag is set there.
"""

# First: importing the others may load torch_xla, and that calls this one.
from torch_xla_pp.cpu.before_client import prepare_client

# isort: split
from torch_xla_pp.cpu.activations import gelu, gelu_grad
from torch_xla_pp.cpu.client import (
    begin_step,
    copying_large_values,
    is_recycling,
    launched_apart,
    most_joined_bytes,
    most_small_bytes,
    starting,
)
from torch_xla_pp.cpu.handlers import (
    call_handler,
    calling_on_parts,
    fits_own_ops,
    has_ops_of_parts,
    has_own_ops,
    placed_calls,
)
from torch_xla_pp.cpu.heads import (
    Scores,
    Strided,
    attend,
    attend_grad,
    has_attention,
    has_attention_of_parts,
    is_read_in_place,
)
from torch_xla_pp.cpu.products import (
    Addend,
    BiasedProduct,
    PartProduct,
    Product,
    ProductSides,
    ProductSum,
    add_product,
    library_product,
    library_product_of_parts,
    multiply_biased,
)
from torch_xla_pp.cpu.rows import (
    norm,
    norm_factor_grad,
    norm_grad,
    softmax,
    softmax_grad,
    total,
)
from torch_xla_pp.cpu.views import copied_view, split

__all__ = [
    "Addend",
    "BiasedProduct",
    "PartProduct",
    "Product",
    "ProductSides",
    "ProductSum",
    "Scores",
    "Strided",
    "add_product",
    "attend",
    "attend_grad",
    "begin_step",
    "call_handler",
    "calling_on_parts",
    "copied_view",
    "copying_large_values",
    "fits_own_ops",
    "gelu",
    "gelu_grad",
    "has_attention",
    "has_attention_of_parts",
    "has_ops_of_parts",
    "has_own_ops",
    "is_read_in_place",
    "is_recycling",
    "launched_apart",
    "library_product",
    "library_product_of_parts",
    "most_joined_bytes",
    "most_small_bytes",
    "multiply_biased",
    "norm",
    "norm_factor_grad",
    "norm_grad",
    "placed_calls",
    "prepare_client",
    "softmax",
    "softmax_grad",
    "split",
    "starting",
    "total",
]
