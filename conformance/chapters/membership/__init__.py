"""Chapter membership: Membership."""
