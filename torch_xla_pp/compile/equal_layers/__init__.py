"""Equal layers of a stage, of which only some are traced.

Most models repeat one layer many times, and to trace a layer's forward and backward is
Python of torch's that takes as long for each. So a stage with many equal layers is
traced without most of them, and what its joint graph has of one is repeated for those
that were left out.

Layers are not told by modules but by the graph: operations repeat with a *period* if
each equals the one that comes a period later, and reads what lies a period later: the
same value, or the parameter of the next layer, see `runs`. Both graphs are cut so: that
of the forward before it is traced, see `shorten`, and the joint graph, see `lengthen`.
Where anything does not repeat, the stage is traced as it is.
"""

from torch_xla_pp.compile.equal_layers.lengthen import lengthen
from torch_xla_pp.compile.equal_layers.shorten import Shortened, shorten

__all__ = ["Shortened", "lengthen", "shorten"]
