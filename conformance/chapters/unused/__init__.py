"""Chapter unused: Unused parameters."""
