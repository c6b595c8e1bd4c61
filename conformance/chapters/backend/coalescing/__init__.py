"""Chapter coalescing: what a backend owes by itself."""
