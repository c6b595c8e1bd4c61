"""Chapter crossed: what a backend owes by itself, in circumstances that meet."""
