"""Ways in: wrap, attach, Synchronizer, Gossip, all_reduce, a process group."""
