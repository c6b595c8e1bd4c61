"""Chapter copies: Copies and state."""
