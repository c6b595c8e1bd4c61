"""Whether the requirements notice DDPs and backends that are wrong on purpose, and a page about it."""
