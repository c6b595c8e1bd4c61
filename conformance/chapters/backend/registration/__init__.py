"""Chapter registration: what a backend owes by itself."""
