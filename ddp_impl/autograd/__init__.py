"""Hooks into autograd: a gradient arrives, a backward begins, it ends."""
