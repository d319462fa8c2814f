"""What may never happen to a store, tried: power cuts, kills, rot, full disks, forks, odd clocks.

Each kind of torture takes a count: pytest runs a few cases of each, ``make torture`` the figures of
docs/torture.md. ``python -m tests.torture --help`` says the rest.
"""
