"""Composed trainings: modules and actions combined at random, each run under a DDP and without one.

`training` defines a training, `modules` builds its module, `trainee` plays one rank's part, `changes` changes the
module and `snapshots` observes it, `refusal` lists what a DDP may refuse, `grammar` draws trainings, `simpler` shrinks
them, and `features` measures their coverage.
"""
