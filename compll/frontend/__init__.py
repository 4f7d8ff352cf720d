"""Translation of a spec's YAML text to a typed module: reading, typing rules, checks, warnings."""
