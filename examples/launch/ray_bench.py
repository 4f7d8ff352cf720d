"""Ray Train, on a cluster or on this host: WORKERS=2 python examples/launch/ray_bench.py --quick

On GPUs add --device cuda: each worker has one.
"""

import os
import sys

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def bench(config: dict[str, list[str]]) -> None:
    """Run the benchmark on this worker."""
    from hipress.tools.cli import app

    app(["bench", *config["options"]], standalone_mode=False)


if __name__ == "__main__":
    ray.init(configure_logging=False)
    count = int(os.environ.get("WORKERS", "2"))
    workers = ScalingConfig(num_workers=count, use_gpu="cuda" in sys.argv)
    TorchTrainer(bench, train_loop_config={"options": sys.argv[1:]}, scaling_config=workers).fit()
