"""The engine: the log today; pages, transactions and streams stand on it."""
