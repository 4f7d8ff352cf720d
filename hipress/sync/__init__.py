"""What runs in every step: buckets, state, checks."""
