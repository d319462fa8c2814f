"""Maintenance of a store from outside an engine: inspect, verify, compact, evict, export and import.

``inspect`` opens a store of any layout; ``upkeep`` changes one; ``archive`` writes one to a file and reads it back.
Called by ``cli`` alone.
"""
