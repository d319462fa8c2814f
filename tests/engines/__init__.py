"""Tests inside real engines. They run where the engine is installed, and are skipped elsewhere."""
