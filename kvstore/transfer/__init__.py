"""Threads: the writer thread, background tasks, jobs and parallel reads; every queue is bounded.

The boundary of the flow: modules below decide and touch no thread, modules above hand work to these threads.
"""
