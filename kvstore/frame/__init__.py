"""A frame: one block as stored, with header, token ids, payload and a checksum per part.

``header`` and ``geometry`` define fields and offsets, ``format`` seals and verifies frames, ``targets`` maps their
payloads to memory, ``at_rest`` quantizes or compresses them. Imports ``codec``, ``layout`` and ``identity``; called by
the tiers, the writer and every reader. docs/format.md is normative.
"""
