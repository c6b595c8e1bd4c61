"""Every private name of torch that `ddp_impl` depends on: what it is needed for, and why no public one will do.

Nothing else in `ddp_impl` names a private module or attribute of torch; a test keeps it so. When a version of torch
moves one of them, this folder is where to look: it has a file per subject. The tests of `ddp_impl` and
`ddp-conformance` exercise all of them on torch 2.13.0+cpu (2026-11), which this repository pins; docs/torch_versions.md
says in which versions each was seen, and `python -m ddp_impl.torch_internals` looks for them in the installed one.
"""
