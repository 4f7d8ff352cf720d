"""The work of every step: buckets, state, checks."""
