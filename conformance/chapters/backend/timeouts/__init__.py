"""Chapter timeouts: what a backend owes by itself."""
