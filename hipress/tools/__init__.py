"""Commands that measure, predict or show, and the command line `hipress` that lists them.

Nothing else of the package imports this one, whose libraries are those of the extra `tools`.
"""
