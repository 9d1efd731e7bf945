"""The log on its own: ordering, writing, sealing, reading, verifying and repairing segments."""
