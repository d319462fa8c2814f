"""Recorded requests: reading, cutting, merging, writing and anonymising traces."""
