"""Checkpoints: what a database holds at a seq, its root, and the packs that have it."""
