"""Benchmarks: `training` (the demo's workload on emulated links), `netns` (those links), `codecs`
and `gpu` (kernels), `sidco` (threshold estimators), `spec_table` (docs/compressors.md)."""
