"""Chapter optional: what a backend owes by itself."""
