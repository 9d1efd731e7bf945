"""Suites that every implementation of an interface has to pass, and a real S3 server for them."""
