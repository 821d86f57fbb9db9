"""Save and load runs by the original names of a model, on any ranks and devices.

Formats and storage are those of torch.distributed.checkpoint and safetensors.
"""

from torch_xla_pp.checkpoint.folders import latest
from torch_xla_pp.checkpoint.hugging_face import load_safetensors, save_safetensors
from torch_xla_pp.checkpoint.planners import LoadPlanner, SavePlanner
from torch_xla_pp.checkpoint.saving import async_save, load, save
from torch_xla_pp.checkpoint.state import State

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "State",
    "async_save",
    "latest",
    "load",
    "load_safetensors",
    "save",
    "save_safetensors",
]
