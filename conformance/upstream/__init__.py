"""Runs torch's own DDP tests with another DDP in the place of torch's.

The torch wheel ships the tests of its DistributedDataParallel. `upstream` runs them over gloo on the CPU, once with
torch's DDP and once with the DDP under test. The DDP under test must pass every test that torch's DDP passes.
"""
