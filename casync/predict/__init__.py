"""How long a step will take: formulas, and a simulation of the graph."""
