"""Chapter dtypes: what a backend owes by itself."""
