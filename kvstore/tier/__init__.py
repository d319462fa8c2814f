"""Where blocks live. Tiers move bytes; they decide nothing and do not know each other."""
