"""What a cache of another size or policy would have done with a recorded trace."""
