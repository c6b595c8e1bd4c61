"""Chapter lifecycle: what a backend owes by itself."""
