"""Chapter layouts: what a backend owes by itself."""
