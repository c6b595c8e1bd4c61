"""Operations of a c10d backend: what each is given, what must come of it, and in which circumstances."""
