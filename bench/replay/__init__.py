"""Cost and effect of bounded replay on the reference engine."""
