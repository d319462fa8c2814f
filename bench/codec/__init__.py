"""Benchmarks of codecs: speed and loss."""
