"""`hipress bench`: what methods cost on the ranks that are there, or on emulated hosts."""
