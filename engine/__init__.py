"""The engine: the log, and on it pages, transactions, sessions and checkpoints."""
