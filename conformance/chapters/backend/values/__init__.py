"""Chapter values: what a backend owes by itself."""
