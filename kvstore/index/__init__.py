"""The index of a tier, and decisions as values.

``prefix_tree`` maps chains of block keys to segments of cached prefixes; ``plan`` decides on lengths. Both are pure: no
medium, clock or thread. The cache and the simulator share them.
"""
