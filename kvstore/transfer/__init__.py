"""Threads: the commit queue, task threads, jobs and parallel reads. Every queue is bounded.

Modules below decide and use no thread; modules above hand their work to these threads as callbacks.
No module here chooses a block. Start with ``commit_queue``, then ``job``; ``interrupts`` protects calls from Ctrl-C.
"""
