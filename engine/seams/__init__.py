"""The outside world: files, clock, threads, randomness and signals, with the real ones beside the fakes."""
