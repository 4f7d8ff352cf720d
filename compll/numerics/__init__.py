"""Numbers that all backends agree on: rounding, order of sums, draws, elementary functions."""
