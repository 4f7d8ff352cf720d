"""The model that is averaged: its parameters, their devices, shards and later changes."""
