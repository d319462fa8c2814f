"""Fault injection against whole stores: power cuts, kills, corruption, full disks, forks, clock jumps.

Each kind takes a count: pytest runs a few cases of each, ``make torture`` the counts in docs/torture.md.
``python -m tests.torture --help`` lists kinds and options.
"""
