"""What a step would take on a cluster that is described, not there."""
