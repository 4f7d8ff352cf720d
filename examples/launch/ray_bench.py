"""Ray Train: python examples/launch/ray_bench.py, on a cluster or on this host."""

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
    workers = ScalingConfig(num_workers=2, use_gpu=False)
    TorchTrainer(bench, train_loop_config={"options": sys.argv[1:]}, scaling_config=workers).fit()
