"""Sizes of models' caches: predicted from layouts, and measured on stored blocks.

Start with ``cost`` (predicted bytes), then ``report`` (tables of several models). Imports ``layout`` and
``output``, and ``cache`` to measure; called by ``cli``.
"""
