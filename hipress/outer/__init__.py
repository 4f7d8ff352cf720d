"""The outer loop: sites train alone for many steps, and average the change of their weights."""
