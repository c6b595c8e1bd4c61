"""Chapter reductions: what a backend owes by itself."""
