"""Benchmarks: speeds and costs relative to limits of the same machine."""
