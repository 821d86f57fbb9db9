"""Start scripts as users do."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def torchrun(
    script: Path, *args: str, ranks: int, devices: int, restarts: int = 0
) -> str:
    """Run a script under torchrun and return what it printed.

    Raises:
        AssertionError: It failed; shows its output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command += [str(script), *args]
    env = os.environ | {"CPU_NUM_DEVICES": str(devices), "PJRT_DEVICE": "CPU"}
    with subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            # torchrun ends its ranks when it is asked to, not when it is killed.
            process.terminate()
            output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output
