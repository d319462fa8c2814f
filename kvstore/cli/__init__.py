"""The ``kvstore`` command: parses arguments, calls other packages, prints tables or JSON.

``main`` is the application; ``stores``, ``footprint``, ``simulate``, ``trace`` and ``demo`` have the commands;
``parameters`` and ``terminal`` have common options, tables and progress bars.
"""
