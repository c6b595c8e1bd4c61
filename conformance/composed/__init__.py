"""Composed trainings: modules and actions put together at random, each run under a DDP and without one.

`training` says what a training is, `modules` builds its module, `trainee` plays one rank's part with what `changes` does
to the module and what `sights` shows, `refusal` says what a DDP may refuse, `grammar` draws trainings, `simpler`
shrinks them and `features` measures what they cover.
"""
