"""Chapter ordering: what a backend owes by itself."""
