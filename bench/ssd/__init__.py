"""Speed, space and peers of the SSD tier."""
