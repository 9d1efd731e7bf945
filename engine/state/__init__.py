"""What the log comes to in memory: changes, versions, transactions, sessions, the catalogue."""
