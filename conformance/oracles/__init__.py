"""Oracles: pure functions that compute what ranks must observe, and how an expectation is written."""
