"""From the YAML text of a spec to a typed module: reading, typing rules, checks, warnings."""
