"""The diagram of `ddp_impl`'s reducer, for the page that shows it."""

from enum import Enum


def reducer_diagram() -> str:
    """Return the transitions of an iteration's state as a Mermaid diagram.

    Events with the same states before and after, and the same actions, share an arrow.
    """
    from ddp_impl.reducer.iteration import TRANSITIONS, Progress, Run

    places = [(Progress.IDLE, Run.NONE)]
    arrows: dict[tuple[str, str, str], list[str]] = {}
    for place in places:  # which grows
        for (progress, run, event), (next_progress, next_run, actions) in TRANSITIONS.items():
            if (progress, run) == place:
                following = (next_progress, next_run)
                places += [following] * (following not in places)
                done = ", ".join(action.value for action in actions)
                arrows.setdefault((_name(*place), _name(*following), done), []).append(event.value)
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{progress.value}, {run.value}" as {_name(progress, run)}' for progress, run in places]
    lines.append(f"    [*] --> {_name(*places[0])}")
    for (origin_name, following_name, done), events in arrows.items():
        lines.append(f"    {origin_name} --> {following_name}: {' or '.join(events)}{' / ' * bool(done)}{done}")
    return "\n".join(lines) + "\n"


def _name(*place: Enum) -> str:
    return "_".join(part.name.lower() for part in place)
