"""What the harness knows of a c10d backend and its devices: one `Backend` value per backend."""
