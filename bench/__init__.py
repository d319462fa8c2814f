"""Benchmarks: speeds and costs beside the limits of the same machine."""
