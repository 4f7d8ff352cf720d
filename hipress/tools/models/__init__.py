"""Models as data: gradients in the order of the backward pass, and the work that each waits for.

The JSON files here are made by `python -m bench.models`; `roofline` measures any other model.
"""
