"""Chapter failures: what a backend owes by itself."""
