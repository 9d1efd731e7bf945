"""The database and the fed engine, composed of the rooms below."""
