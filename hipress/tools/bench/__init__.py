"""`hipress bench`: costs of methods on the ranks of a cluster, or on emulated hosts."""
