"""Chapter fates: what a backend owes by itself."""
