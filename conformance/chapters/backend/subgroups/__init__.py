"""Chapter subgroups: what a backend owes by itself."""
