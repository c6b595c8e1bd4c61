"""Runs torch's own DDP tests with another DDP in the place of torch's.

The torch wheel ships the tests of its DistributedDataParallel. They are run twice on the same ranks, over gloo and on
the CPU: for torch's DDP, and for the DDP under test. What torch's DDP passes, the DDP under test must pass.
"""
