"""Eviction policies: the order in which a full tier evicts segments.

Start with ``protocol`` (the interface, and how to add a policy), then ``lru``. ``registry`` lists every policy by
name, for stores and for the simulator. Imports no other package; an ``index`` notifies its policy.
"""
