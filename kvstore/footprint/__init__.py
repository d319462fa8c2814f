"""What a model's cache costs: predicted from its layout, and measured on blocks that were written."""
