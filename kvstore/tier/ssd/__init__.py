"""The SSD tier: frames and their records in LMDB, in one store directory.

Start with ``opening``, then ``tier``, its interface, and ``records``. ``directory``, ``files``, ``owner_lock``,
``version_file`` and ``quarantine`` manage the directory of a store. Imports ``frame`` and ``identity``, and no other
tier.
"""
