"""States of codecs in checkpoints: export, restore, and the check that they fit."""
