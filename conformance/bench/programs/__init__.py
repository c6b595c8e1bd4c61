"""The programs that measure step times."""
