"""Values, texts and helpers that any room may use."""
