"""Chapter functional: what a backend owes by itself."""
