"""The chapters of the specification: one folder each, with requirements, scenarios, programs and mutants."""
