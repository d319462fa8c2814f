"""Figures: what a machine does, beside what it could do."""
