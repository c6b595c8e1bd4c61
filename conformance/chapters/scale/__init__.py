"""Chapter scale: Scale."""
