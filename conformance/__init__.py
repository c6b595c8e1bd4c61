"""Conformance harness for DistributedDataParallel implementations, c10d backends and devices.

Importing this package imports neither torch nor any subject; see `conformance.cli` and `conformance.run.runner`.
"""
