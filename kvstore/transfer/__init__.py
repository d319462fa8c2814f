"""Threads: the writer thread, task threads, jobs and parallel reads. Every queue is bounded.

Modules below decide and use no thread; modules above hand their work to these threads as callbacks.
No module here chooses a block. Start with ``writer_thread``, then ``job``; ``interrupts`` protects calls from Ctrl-C.
"""
