"""Bytes and what they mean: entries, frames, records, pages and blocks, in Python and compiled."""
