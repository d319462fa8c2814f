"""Eviction policies: the order in which a full tier evicts segments."""
