"""Which segment goes first when a tier is full."""
