"""Translation of a typed module to tile programs: feedback, lowering, fusion, memory traffic."""
