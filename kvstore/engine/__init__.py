"""Adapters: how an inference engine's own cache becomes entries, and entries its cache again.

An adapter uses the public contract of ``kvstore`` and nothing behind it. Adapters do not know each
other, and importing this package imports no engine.
"""
