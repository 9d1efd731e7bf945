"""The commands on a database. Those that need its state open it; `history` and `check` read its files."""
