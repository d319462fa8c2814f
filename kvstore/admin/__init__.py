"""Maintenance of stores without an engine: inspect, verify, compact, evict, export and import.

``access`` opens a store of any layout; ``inspect`` reports on it, ``upkeep`` evicts and compacts, ``archive``
exports and imports. Called by ``cli`` alone.
"""
