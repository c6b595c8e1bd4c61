"""Chapter gradients: Gradients."""
