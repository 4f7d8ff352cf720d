"""Benchmarks: `training` (the demo's workload on emulated links), `netns` (those links), `codecs`
and `gpu` (kernels), `spec_table` (docs/compressors.md)."""
