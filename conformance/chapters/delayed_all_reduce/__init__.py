"""Chapter delayed_all_reduce: Delayed all-reduce."""
