"""Benchmarks of engines with and without the store: time to first token, overhead, restarts."""
