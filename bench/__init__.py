"""Benchmarks: `training` (the demo's workload on emulated links), `netns` (those links)."""
