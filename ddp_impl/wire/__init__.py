"""Everything that ranks send each other."""
