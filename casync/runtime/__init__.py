"""What runs a program: jobs, lanes, and what notices that a peer is gone."""
