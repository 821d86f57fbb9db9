"""Install a wheel into a fresh environment without a compiler, and use it.

    python .ci/fresh_install.py build/wheel/*.whl

The environment has nothing but the wheel, and borrows torch and torch_xla from the one
that runs this, as these alone are 7 GB. It finds no package index and no compiler.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import torch_xla_pp as xpp

def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rank = dist.get_rank()
    stage = xpp.PipelineStage(model[rank], rank, 2, xpp.device())
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    return model, schedule, torch.randn(4, 4), torch.zeros(4, 4)
"""


def main(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.startswith("torch_xla_pp/_native") for name in names):
        raise SystemExit(f"{wheel}: expected the compiled library in it, got none")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "venv", with_pip=True)
        installed = home / "venv/lib/python3.11/site-packages"
        borrowed = sysconfig.get_path("purelib")
        (installed / "borrowed.pth").write_text(f"{borrowed}\n")
        env = {
            "HOME": folder,
            "PATH": f"{home}/venv/bin",
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": "2",
            "CC": "/bin/false",
            "CXX": "/bin/false",
        }

        def run(*command: str) -> str:
            program = home / "venv/bin" / command[0]
            done = subprocess.run(
                [str(program), *command[1:]],
                env=env,
                cwd=folder,
                text=True,
                capture_output=True,
                timeout=600,
            )
            print(done.stdout, end="", flush=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}: failed\n{done.stderr}")
            return done.stdout

        run("pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))
        where = run("python", "-c", "import torch_xla_pp as x; print(x.__file__)")
        if not where.startswith(str(installed)):
            raise SystemExit(f"expected the wheel's package, got {where}")
        run("torch-xla-pp", "schedule", "show", "zbv", "--ranks=2", "--microbatches=2")
        if "in_graph" not in run("torch-xla-pp", "doctor"):
            raise SystemExit("expected messages from inside the programs")
        (home / "train.py").write_text(SCRIPT)
        run("torch-xla-pp", "verify", "train.py:small", "--ranks", "2")
    print(f"{wheel.name}: installs and runs, {os.path.getsize(wheel) >> 10} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
