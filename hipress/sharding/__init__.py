"""Compressed collectives of FSDP2: reduce-scatter, all-gather, and the average of replicas."""
