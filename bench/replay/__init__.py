"""Benchmarks of bounded replay on the reference engine: cost and effect."""
