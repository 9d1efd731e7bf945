"""Lowwater's recovery: from the object store alone back to a database."""
