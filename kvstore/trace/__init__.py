"""Recorded requests: read, cut, written, and seen as paths of segments."""
