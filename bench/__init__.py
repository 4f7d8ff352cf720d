"""Benchmarks, each `python -m bench.NAME`.

- Of a training: `training` (step times, on emulated links or on a cluster), `auto`, `throttle` and
  `policies` (what these choose), `losses`.
- Of kernels: `codecs`, `gpu`, `gpu_step`, `gpu_code`.
- Of the engine: `tasks`; `nodes` and `shards`, on the hosts of `netns`.
- Of failures: `chaos` (ranks that end or stop at any moment, and what the others say).
- From what is recorded: `pages` (blocks of the documents), `picture` (README's chart).
"""
