"""Maintenance of a store from outside an engine: inspect, verify, compact, evict, export and import.

``access`` opens a store of any layout; ``inspect`` reports on one, ``upkeep`` changes one, ``archive`` writes one to a file and
reads it back. Called by ``cli`` alone.
"""
