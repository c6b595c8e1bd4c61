"""Every private name of torch that `ddp_impl` depends on: what it is needed for, and why no public one will do.

Nothing else in `ddp_impl` names a private module or attribute of torch; a test keeps it so. When a version of torch
moves one of them, this folder is where to look: it has a file per subject. The tests of `ddp_impl` and
`ddp-conformance` exercise all of them on torch 2.13.0+cpu (2026-11), the only version that this repository pins and has
results of.
"""
