"""What a step does, as data: tasks of all ranks, the parts they move, and their proofs."""
