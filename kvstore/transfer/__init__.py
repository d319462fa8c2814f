"""Threads: the commit queue, task threads, jobs and parallel reads. Every queue is bounded.

Modules below use no thread; modules above pass their work to these threads as callbacks. No module here selects a
block. Start with ``commit_queue``, then ``job``; ``interrupts`` protects calls from Ctrl-C.
"""
