"""When which bucket leaves."""
