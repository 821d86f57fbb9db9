"""The command that compares a script's pipeline with its unsplit model."""

import runpy
from argparse import Namespace

from torch_xla_pp import env
from torch_xla_pp.local_job import run_locally


def verify_script(parsed: Namespace) -> int:
    """Verify in this rank; start the ranks first if there are none yet.

    Returns:
        0 if the pipeline computes what the model does, else 1.
    """
    if env.is_rank():
        return _verify(parsed.target, parsed.tolerance)
    words = ["-m", "torch_xla_pp", "verify", parsed.target]
    if parsed.tolerance is not None:
        words += ["--tolerance", str(parsed.tolerance)]
    ended = run_locally(words, ranks=parsed.ranks, devices=parsed.devices)
    return int(any(rank.code != 0 for rank in ended))


def _verify(target: str, tolerance: float | None) -> int:
    import torch.distributed as dist

    from torch_xla_pp.parity import verify

    script, _, name = target.rpartition(":")
    dist.init_process_group("xla_pp")
    known = runpy.run_path(script or target)
    made = known[name]() if callable(known.get(name)) else None
    if not isinstance(made, tuple) or not 3 <= len(made) <= 4:
        raise ValueError(
            f"{target}: expected a function that returns a model, a schedule, the "
            "model's arguments and, if there is a loss, the target, got "
            f"{type(made).__name__}. Write e.g. def small(): ... return model, "
            "schedule, x, y."
        )
    found = verify(*made, tolerance=tolerance)
    if dist.get_rank() == 0:
        print(found, flush=True)
    dist.destroy_process_group()
    return int(not found.is_equal)
