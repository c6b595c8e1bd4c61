"""Scenarios of chapter construction: the constructor, and the wrapper that it returns."""

from collections.abc import Iterator

from conformance.chapters.construction.circumstances import CIRCUMSTANCES
from conformance.chapters.construction.disagreements import DISAGREEMENTS, NEEDS
from conformance.chapters.construction.users_errors import MODES, PLACES
from conformance.chapters.construction.wrong_arguments import MISTAKES
from conformance.chapters.grid import Grid, Worlds
from conformance.chapters.variants import (
    LOCAL_BUFFERS,
    NO_UNUSED,
    NO_VIEW,
    PLAIN,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    dashed,
    each,
    fields,
    options,
)
from conformance.errors import certain
from conformance.programs.outputs import STRUCTURES
from conformance.scenario import Scenario

_grid = Grid("construction")

_FIND = UNUSED.named("find-unused")
_IGNORING = Variant(needs=("ignored_parameters",))
_SILENT = fields(min_collectives=0)

#: Mistakes that only show when ranks are compared; all others are refused by each rank for itself.
_BETWEEN_RANKS = {
    "CONS-04": ("shape", "transposed_shape"),
    "CONS-05": ("layer_more_on_last", "layer_less_on_last", "frozen_on_last"),
    "CONS-06": ("dtype",),
    "CONS-07": ("parameter_ignored_on_last", "buffer_ignored_on_last"),
    "CONS-41": ("two_device_ids_on_first", "unknown_option_on_last"),
    "CONS-37": (
        "larger_buffer",
        "smaller_buffer",
        "buffer_of_integers",
        "buffer_more",
        "buffer_of_two",
        "larger_frozen",
    ),
    "CONS-36": ("reordered", "frozen_reordered", "buffers_reordered"),
}
_LOCAL = {
    "CONS-08": ("no_parameters", "all_frozen", "all_ignored"),
    "CONS-09": ("two_device_ids", "device_ids_on_cpu", "output_device_on_cpu"),
    "CONS-10": ("group_and_mesh", "two_dimensional_mesh"),
    "CONS-42": ("group_is_text", "group_is_ranks", "group_of_others", "group_is_0", "group_is_empty"),
    "CONS-11": ("negative_cap", "negative_cap_in_list", "cap_is_text"),
    "CONS-12": ("function", "class"),
    "CONS-13": ("lazy",),
    "CONS-29": ("expanded",),
    "CONS-14": ("two_device_types",),
    "CONS-39": ("all_meta", "one_on_meta", "all_meta_on_first"),
    "CONS-15": ("delay_without_hook", "hook_without_delay"),
    "CONS-24": ("unknown_option",),
}
_IGNORED = {"root": ("weight", "table", "count"), "child": ("child.weight", "child.bias", "state.mask", "state.hidden")}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    tried = {name for names in (*_BETWEEN_RANKS.values(), *_LOCAL.values()) for name in names}
    certain(tried == set(MISTAKES), "every mistake is tried")
    yield from _state()
    yield from _errors()
    yield from _surface()
    yield from _calls()
    training = arguments("training", mode="training")
    modes = each("mode", [mode for mode in MODES if mode != "training"])
    raised = (training.at(1, 2, 3), *modes, training | VIEW, training | _FIND, training | STATIC)
    for place in PLACES:
        yield from _grid("CONS-34", f"users-errors-{place}", "users_errors", 2, arguments(place=place), raised)
    ways = (PLAIN.at(1, 2, 3), _FIND, STATIC, VIEW)
    yield from _grid("CONS-35", "", "circumstances", 2, each("circumstance", CIRCUMSTANCES), ways)


def _state() -> Iterator[Scenario]:
    yield from _grid("CONS-01", "differing", "initial_state", (1, 2, 3, 4), also=("CONS-02",))
    not_at_first = Variant("no-init-sync", options={"init_sync": False}, needs=("init_sync",))
    ignored = [arguments(f"ignored-{slug}", ignored=list(names)) for slug, names in _IGNORED.items()]
    for world_size in (2, 3):
        yield from _grid("CONS-02", "", "initial_state", world_size, LOCAL_BUFFERS.named("no-forward-sync"))
        yield from _grid("CONS-03", "", "initial_state", world_size, not_at_first, _SILENT)
        yield from _grid("CONS-22", "", "initial_state", world_size, ignored, _IGNORING)
        kinds = (arguments("made-of-others"), arguments("of-a-class", in_one=True))
        yield from _grid("CONS-38", "", "composite_state", world_size, kinds, min_collectives=0)


def _errors() -> Iterator[Scenario]:
    for requirement, mistakes in _BETWEEN_RANKS.items():
        for mistake in mistakes:
            yield from _error(requirement, mistake, (2, 3))
    for requirement, mistakes in _LOCAL.items():
        for mistake in mistakes:
            yield from _error(requirement, mistake, 2)
    for argument, (usual, _) in DISAGREEMENTS.items():
        needed = Variant(needs=NEEDS.get(argument, ()))
        # A DDP that lacks the argument lacks the option.
        named = {} if "delay_all_reduce" in needed.needs else usual
        given = arguments(dashed(argument), argument=argument) | options(**named) | needed
        odd = arguments("first", odd=0), arguments("last", odd=1)
        ends = fields(deadline_s=10.0, min_collectives=0)
        yield from _grid("CONS-41", "", "disagreement", 2, given, odd if argument == "init_sync" else odd[1], ends)
    for mistake in ("no_parameters", "two_device_ids", "lazy", "layer_more_on_last", "dtype", "reordered"):
        yield from _error("CONS-16", mistake, 2, recover=True)
    yield from _error("CONS-16", "layer_less_on_last", 4, recover=True)
    for mistake in ("two_device_ids_on_first", "unknown_option_on_last two_device_ids_on_first"):
        yield from _error("CONS-16", mistake, (2, 3), recover=True)
    for mistake in ("all_meta_on_first", "two_device_ids_on_first"):
        yield from _error("CONS-16", mistake, 2, recover=True, late=True)


def _error(
    requirement: str, mistake: str, worlds: Worlds, *, recover: bool = False, late: bool = False
) -> Iterator[Scenario]:
    asked = arguments(dashed(mistake).replace(" ", "-"), mistake=mistake, recover=recover)
    asked |= arguments("late", late=True) if late else PLAIN
    needed = _IGNORING if "ignored" in mistake else PLAIN
    least = 1 if recover else 0
    yield from _grid(
        requirement, "", "construction_error", worlds, asked, needed, min_collectives=least, deadline_s=5.0
    )


def _surface() -> Iterator[Scenario]:
    checked = options(check_reduction=True)
    yield from _grid("CONS-25", "trains", "autograd_use", 2, checked, arguments(use="ordinary"))
    for requirement, aspect in (
        ("CONS-17", "identity"),
        ("CONS-18", "state"),
        ("CONS-19", "modes"),
        ("CONS-24", "signature"),
        ("CONS-25", "check_reduction"),
        ("CONS-28", "attributes"),
        ("CONS-22", "ignore_by_method"),
    ):
        # A surface need not communicate.
        yield from _grid(requirement, "", "wrapper_surface", (1, 2), each("aspect", [aspect]), _SILENT)
    for requirement, aspect in (("CONS-31", "state_dict"), ("CONS-32", "load_state_dict"), ("CONS-33", "walks")):
        yield from _grid(requirement, "every", "module_surface", (1, 2), each("aspect", [aspect]))
    attributes = each("aspect", ["attributes"])
    for option in ("find_unused_parameters", "gradient_as_bucket_view"):
        on = Variant(dashed(option), options={option: True}, needs=(option,))
        yield from _grid("CONS-28", "", "wrapper_surface", 2, attributes, on, _SILENT)


def _calls() -> Iterator[Scenario]:
    # What is opaque no DDP needs to understand: chapter unused.
    structures = each("structure", [structure for structure in STRUCTURES if structure != "opaque"])
    yield from _grid("CONS-21", "", "outputs", (1, 2), structures, requirements=("CONS-20", "CONS-21"))
    yield from _grid("CONS-20", "arguments", "outputs", 3, arguments(structure="tuple"))
    passed, gradients = arguments(judge="passed"), arguments(judge="gradients")
    yield from _grid("CONS-20", "no-argument", "calls", (1, 2), passed, arguments(arguments=False))
    ways = (PLAIN.at(1, 2, 3), _FIND.at(2, 3), STATIC)
    yield from _grid("CONS-20", "every-call", "calls", 2, passed, ways)
    yield from _grid("CONS-30", "every-call", "calls", 2, gradients, ways)
    either_search, either_view = (NO_UNUSED, _FIND), (NO_VIEW, VIEW)
    yield from _grid("CONS-23", "hooks", "autograd_use", (2, 3), arguments(use="module_hooks"), either_search)
    ignored = each("use", ("ignored_in_root", "ignored_in_child", "ignored_among_neighbours"))
    yield from _grid("CONS-22", "", "autograd_use", (2, 3), ignored, either_search, _IGNORING)
    tied, *others = each("use", ("tied", "odd_shapes", "twins"))
    shared = (tied | Variant(also=("GRAD-22",)), *others)
    yield from _grid("CONS-26", "", "autograd_use", (2, 3), shared, either_view)
    for world_size in (2, 3, 4):
        yield from _grid("CONS-27", "two-groups", "subgroups", world_size, (PLAIN, _FIND))
    several = arguments("two-wrappers", wrappers=2)
    yield from _grid("CONS-27", "two-groups", "subgroups", (3, 4), (PLAIN, _FIND), several)
    yield from _grid("CONS-40", "group-destroyed", "destroyed_group", (2, 3), (PLAIN, _FIND))
