"""Models as data: gradients in the order of the backward pass, and the work that each waits for.

The JSON files were made by `roofline`, on the meta device, of the networks that their `source`
names; it measures any other model.
"""
