"""Identity of a block: block keys, namespaces and chained SHA-256 hashes of token blocks.

Imports only ``errors`` and ``checks``. Every other package uses these keys; none computes a hash itself. Start with
``block``, then ``namespace``, ``hash`` and ``chain`` (a request's tokens as keys).
"""
