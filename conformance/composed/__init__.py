"""Composed trainings: modules and actions put together at random, each run under a DDP and without one.

`training` says what a training is, `modules` builds its module, `trainee` plays one rank's part, `changes` is what the
loop does to the module and `sights` what is seen of it, `refusal` says what a DDP may refuse, `grammar` draws
trainings, `simpler` shrinks them and `features` measures what they cover.
"""
