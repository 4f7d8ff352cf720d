"""submitit: python examples/launch/submitit_bench.py; cluster="slurm" for more than this host."""

import sys

import submitit


def bench(options: list[str]) -> None:
    """Run the benchmark on this task."""
    submitit.helpers.TorchDistributedEnvironment().export(overwrite=True)
    from hipress.tools.cli import app

    app(["bench", *options], standalone_mode=False)


if __name__ == "__main__":
    executor = submitit.AutoExecutor("submitit-logs", cluster="local")
    executor.update_parameters(nodes=1, tasks_per_node=2, timeout_min=30)
    executor.submit(bench, sys.argv[1:]).results()
