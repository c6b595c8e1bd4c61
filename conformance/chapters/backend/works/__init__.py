"""Chapter works: what a backend owes by itself."""
