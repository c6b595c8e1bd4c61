"""Draws how a loop handles its wrapper besides training: it drops, nests or transforms the wrapper."""

from dataclasses import replace

from conformance.composed.choose import Choose
from conformance.composed.training import HANDLING, NESTED, Action, Training

_WAYS = tuple((kind, how) for kind, ways in HANDLING.items() for how in ways)
_MOST_DRAWN = 2


def handled(training: Training, choose: Choose, must: tuple[str, ...]) -> Training:
    """Return `training` with more handling, including the features in `must`."""
    nested = [one for one in NESTED if f"nested {one}" in must]
    training = replace(training, nested=choose(nested or ("", "", *NESTED)))
    actions = list(training.actions)
    for _ in range(choose(range(0 if training.is_handled else 1, _MOST_DRAWN + 1))):
        kind, how = choose(_WAYS)
        around = choose(((), (Action("forward", "plain"), Action("backward", "together"))))
        position = choose(range(len(actions) + 1))
        actions[position:position] = [*around[:1], Action(kind, how), *around[1:]]
    return replace(training, actions=tuple(actions))
