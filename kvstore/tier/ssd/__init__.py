"""The SSD tier: frames and their records in LMDB, in one store directory.

``tier`` is the medium's interface, ``records`` the record format, ``directory`` the files of a store, ``btree`` and
``direct`` checks below LMDB. It imports ``frame`` and ``identity``, and knows no other tier and no cache.
"""
