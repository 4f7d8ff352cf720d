"""Translation of a typed module to a program: feedback, phases, schedule, memory traffic."""
