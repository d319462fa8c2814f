"""Simulation of caches on recorded traces: policies, sizes, tiers and window pools."""
