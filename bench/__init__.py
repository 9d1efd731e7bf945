"""Benchmarks: Lowwater against a raw loop and against its peers, in the same run. Start with `log.py`."""
