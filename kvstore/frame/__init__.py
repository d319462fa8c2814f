"""A frame: one block as stored, with header, token ids, payload and a checksum per part.

``format`` seals and verifies frames; ``at_rest`` quantizes or compresses their payload. Imports ``codec``, ``layout``
and ``identity``; called by the tiers, the writer and every reader. docs/format.md is normative.
"""
