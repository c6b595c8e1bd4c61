"""Chapter composed: trainings that nobody wrote down."""
