"""A step as data: tasks of all ranks, the parts they move, and proofs about them."""
