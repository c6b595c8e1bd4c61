"""Chapter comm_hooks: Communication hooks."""
