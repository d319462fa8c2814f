"""The index of a tier and the decisions made on it.

``prefix_tree`` maps block keys to segments of cached prefixes; ``plan`` returns decisions as values. Both are pure:
no medium, clock or thread. Shared by the cache and the simulator.
"""
