"""examples/elastic.py, in which a rank is killed once.

    torchrun ... elastic_killed.py STEPS RANK STEP

RANK is killed after STEP steps of its process. Rank 0 prints what each checkpoint has not
delivered, as it is saved and after it is loaded: a sum and a norm over all parameters.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.optim.optimizer import register_optimizer_step_post_hook

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"


def telling(name):
    function = getattr(dcp, name)

    def call(checkpoint, **given):
        function(checkpoint, **given)
        held = checkpoint["hipress"].state_dict()["undelivered"].values()
        whole = [values.full_tensor().double() for values in held]
        total, square = (
            sum(each.sum() for each in whole),
            sum(each.square().sum() for each in whole),
        )
        if dist.get_rank() == 0:
            step = checkpoint["training"].step
            print(f"{name} {step} {total:.6f} {square.sqrt():.6f}", flush=True)

    return call


def main():
    steps, victim, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    marker, taken = Path(f"killed-{steps}"), 0

    def count(*_):
        nonlocal taken
        taken += 1
        if taken == last and dist.get_rank() == victim and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    dcp.save, dcp.load = telling("save"), telling("load")
    sys.argv = [str(EXAMPLE), steps]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
