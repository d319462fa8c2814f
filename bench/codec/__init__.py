"""Speed and loss of the codecs."""
