"""Entry points of a training: DistributedDataParallel, `Synchronizer`, `Gossip`, `all_reduce`."""
