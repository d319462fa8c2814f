"""Benchmarks of the simulator: speed and accuracy."""
