"""Chapter training: Training."""
