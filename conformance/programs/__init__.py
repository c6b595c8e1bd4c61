"""Programs: what every rank runs (SPMD), and what must come of it."""
