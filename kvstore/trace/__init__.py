"""Recorded requests: reading, cutting, merging, writing and anonymising traces.

Start with ``columns`` (a trace in memory), then ``reading``; ``formats`` has one parser per format. Imports
``errors``, ``checks`` and ``output``; called by ``simulate`` and ``cli``.
"""
