"""Chapter composed: random trainings."""
