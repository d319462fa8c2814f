"""Memory cost of models' caches: predicted from layouts, and measured on written blocks."""
