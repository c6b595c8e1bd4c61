"""Operations of a c10d backend: their inputs, their right outputs, and the circumstances of a call."""
