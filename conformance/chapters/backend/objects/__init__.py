"""Chapter objects: what a backend owes by itself."""
