"""Benchmarks of the SSD tier: speed, space and peers."""
