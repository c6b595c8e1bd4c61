"""Chapter refusals: what a backend owes by itself."""
