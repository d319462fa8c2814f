"""The ``kvstore`` command: arguments in, tables or JSON out, one exit code.

``main`` is the application; ``stores`` has the commands about a store, ``footprint``, ``simulate``, ``trace`` and ``demo`` the others;
``parameters`` and ``terminal`` hold the options, tables and progress bars that they share.
"""
