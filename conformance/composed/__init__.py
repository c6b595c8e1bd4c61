"""Composed trainings: modules and actions put together at random, each run under a DDP and without one.

`training` says what a training is, `modules` builds its module, `trainee` plays one rank's part, `truth` plays all
parts without DDP, `refusal` says what a DDP may refuse, `grammar` draws trainings, `simpler` shrinks them and
`features` measures what they cover.
"""
