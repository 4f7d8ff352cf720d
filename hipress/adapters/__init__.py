"""Sources of gradients: DDP's communication hook, plain modules, and gossip."""
