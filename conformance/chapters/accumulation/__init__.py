"""Chapter accumulation: Gradient accumulation with no_sync."""
