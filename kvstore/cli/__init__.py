"""The ``kvstore`` command: arguments in, tables or JSON out, one exit code.

``main`` holds the commands about a store; ``footprint``, ``simulate``, ``trace`` and ``demo`` the others; ``parameters`` and
``terminal`` hold the options, tables and progress bars that they share.
"""
