"""Chapter messages: what a backend owes by itself."""
