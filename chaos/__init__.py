"""Attacks on the engine, and the fakes that they need."""
