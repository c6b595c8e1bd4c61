"""Chapter tensor_parallel: Tensor parallelism."""
