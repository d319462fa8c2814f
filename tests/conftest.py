"""One Hypothesis profile for the whole suite: the same examples every time, and no clock."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("exact", deadline=None, derandomize=True, database=None)
settings.load_profile("exact")
