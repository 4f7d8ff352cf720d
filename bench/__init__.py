"""Benchmarks of the project itself, each `python -m bench.NAME`.

Your own training: `hipress bench`.
- Of a training: `training` (step times on emulated links), `losses` and `outer` (losses),
  `time_to_loss`, `weights`.
- Of kernels: `codecs`, `gpu`, `gpu_step`.
- Of the engine: `tasks`, `way`; `netns` starts any program on emulated hosts.
- Of failures: `chaos` (ranks that end or stop at any moment, and what the others say), `fuzz`.
- Of the planner: `published` (published results beside predictions).
- From what is recorded: `pages` (blocks of the documents), `picture` (README's chart).
"""
