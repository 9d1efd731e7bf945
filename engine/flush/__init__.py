"""Changes go from memory into pages, in the background."""
