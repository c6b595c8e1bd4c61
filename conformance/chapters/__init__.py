"""The scenarios, one module per chapter of the specification."""
