"""Bytes of a model's cache: predicted from its layout, and measured on stored blocks.

Start with ``report`` (the table of several models), then ``cost`` (bytes of one). Imports ``layout`` and
``output``, and ``cache`` to measure; called by ``cli``.
"""
