"""Scenarios of chapter construction: the constructor, and the wrapper that it returns."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.construction.circumstances import CIRCUMSTANCES
from conformance.chapters.construction.users_errors import MODES, PLACES
from conformance.chapters.construction.wrong_arguments import MISTAKES
from conformance.chapters.in_chapter import in_chapter
from conformance.own_mistake import certain
from conformance.programs.outputs import STRUCTURES
from conformance.scenario import Scenario

_scenario = in_chapter("construction")

#: Mistakes that only show when ranks are compared; all others are refused by each rank for itself.
_BETWEEN_RANKS = {
    "CONS-04": ("shape", "transposed_shape"),
    "CONS-05": ("layer_more_on_last", "layer_less_on_last", "frozen_on_last"),
    "CONS-06": ("dtype",),
    "CONS-07": ("parameter_ignored_on_last", "buffer_ignored_on_last"),
}
_LOCAL = {
    "CONS-08": ("no_parameters", "all_frozen", "all_ignored"),
    "CONS-09": ("two_device_ids", "device_ids_on_cpu", "output_device_on_cpu"),
    "CONS-10": ("group_and_mesh", "two_dimensional_mesh"),
    "CONS-11": ("negative_cap", "negative_cap_in_list", "cap_is_text"),
    "CONS-12": ("function", "class"),
    "CONS-13": ("lazy",),
    "CONS-29": ("expanded",),
    "CONS-14": ("two_device_types",),
    "CONS-15": ("delay_without_hook", "hook_without_delay"),
    "CONS-24": ("unknown_option",),
}
_IGNORED = {
    "root": ("weight", "table", "count"),
    "child": ("child.weight", "child.bias", "state.mask", "state.hidden"),
}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    tried = {name for names in (*_BETWEEN_RANKS.values(), *_LOCAL.values()) for name in names}
    certain(tried == set(MISTAKES), "every mistake is tried")
    yield from _state()
    yield from _errors()
    yield from _surface()
    yield from _calls()
    yield from _users_errors()
    yield from _circumstances()


def _state() -> Iterator[Scenario]:
    for world_size in (1, 2, 3, 4):
        yield _scenario("CONS-01", "differing", "initial_state", world_size).replace(
            requirements=("CONS-01", "CONS-02")
        )
    for world_size in (2, 3):
        yield _scenario(
            "CONS-02", "no-forward-sync", "initial_state", world_size, options={"forward_sync_buffers": False}
        )
        yield _scenario(
            "CONS-03", "no-init-sync", "initial_state", world_size, options={"init_sync": False}, min_collectives=0,
            needs=("init_sync",),
        )  # fmt: skip
        for slug, names in _IGNORED.items():
            yield _scenario(
                "CONS-22", f"ignored-{slug}", "initial_state", world_size, arguments={"ignored": list(names)},
                needs=("ignored_parameters",),
            )  # fmt: skip


def _errors() -> Iterator[Scenario]:
    for requirement, mistakes in _BETWEEN_RANKS.items():
        for mistake in mistakes:
            for world_size in (2, 3):
                yield _error(requirement, mistake, world_size)
    for requirement, mistakes in _LOCAL.items():
        for mistake in mistakes:
            yield _error(requirement, mistake, 2)
    for mistake in ("no_parameters", "two_device_ids", "lazy", "layer_more_on_last", "dtype"):
        yield _error("CONS-16", mistake, 2, recover=True)
    yield _error("CONS-16", "layer_less_on_last", 4, recover=True)


def _error(requirement: str, mistake: str, world_size: int, *, recover: bool = False) -> Scenario:
    return _scenario(
        requirement, mistake.replace("_", "-"), "construction_error", world_size,
        arguments={"mistake": mistake, "recover": recover}, min_collectives=1 if recover else 0, deadline_s=5.0,
        needs=("ignored_parameters",) if "ignored" in mistake else (),
    )  # fmt: skip


def _surface() -> Iterator[Scenario]:
    yield _scenario(
        "CONS-25", "trains", "autograd_use", 2, options={"check_reduction": True}, arguments={"use": "ordinary"}
    )
    for requirement, aspect in (
        ("CONS-17", "identity"), ("CONS-18", "state"), ("CONS-19", "modes"), ("CONS-24", "signature"),
        ("CONS-25", "check_reduction"), ("CONS-28", "attributes"), ("CONS-22", "ignore_by_method"),
    ):  # fmt: skip
        for world_size in (1, 2):
            yield _scenario(
                requirement, aspect.replace("_", "-"), "wrapper_surface", world_size, arguments={"aspect": aspect},
                min_collectives=0,  # a surface need not communicate
            )  # fmt: skip
    for requirement, aspect in (("CONS-31", "state_dict"), ("CONS-32", "load_state_dict"), ("CONS-33", "walks")):
        for world_size in (1, 2):
            slug, arguments = f"every-{aspect.replace('_', '-')}", {"aspect": aspect}
            yield _scenario(requirement, slug, "module_surface", world_size, arguments=arguments)
    for option in ("find_unused_parameters", "gradient_as_bucket_view"):
        yield _scenario(
            "CONS-28", f"attributes-{option.replace('_', '-')}", "wrapper_surface", 2,
            arguments={"aspect": "attributes"}, options={option: True}, needs=(option,), min_collectives=0,
        )  # fmt: skip


def _calls() -> Iterator[Scenario]:
    for structure in STRUCTURES:
        if structure == "opaque":  # which no DDP needs to understand: chapter unused
            continue
        for world_size in (1, 2):
            yield _scenario(
                "CONS-21", structure.replace("_", "-"), "outputs", world_size, arguments={"structure": structure}
            ).replace(requirements=("CONS-20", "CONS-21"))
    yield _scenario("CONS-20", "arguments", "outputs", 3, arguments={"structure": "tuple"})
    nothing = {"judge": "passed", "arguments": False}
    for world_size in (1, 2):
        yield _scenario("CONS-20", "no-argument", "calls", world_size, arguments=nothing)
    ways: tuple[tuple[str, dict[str, bool], tuple[int, ...]], ...] = (
        ("", {}, (1, 2, 3)), ("-find-unused", {"find_unused_parameters": True}, (2, 3)),
        ("-static", {"static_graph": True}, (2,)),
    )  # fmt: skip
    for requirement, judge in (("CONS-20", "passed"), ("CONS-30", "gradients")):
        for suffix, options, world_sizes in ways:
            for world_size in world_sizes:
                yield _scenario(
                    requirement, f"every-call{suffix}", "calls", world_size, arguments={"judge": judge},
                    options=options,
                )  # fmt: skip
    for find_unused in (False, True):
        for world_size in (2, 3):
            yield _scenario(
                "CONS-23", f"hooks{'-find-unused' * find_unused}", "autograd_use", world_size,
                arguments={"use": "module_hooks"}, options={"find_unused_parameters": find_unused},
            )  # fmt: skip
    for use in ("ignored_in_root", "ignored_in_child", "ignored_among_neighbours"):
        for find_unused in (False, True):
            for world_size in (2, 3):
                yield _scenario(
                    "CONS-22", f"{use.replace('_', '-')}{'-find-unused' * find_unused}", "autograd_use", world_size,
                    arguments={"use": use}, options={"find_unused_parameters": find_unused},
                    needs=("ignored_parameters",),
                )  # fmt: skip
    for use in ("tied", "odd_shapes", "twins"):
        for as_view in (False, True):
            for world_size in (2, 3):
                scenario = _scenario(
                    "CONS-26", f"{use.replace('_', '-')}{'-view' * as_view}", "autograd_use", world_size,
                    arguments={"use": use}, options={"gradient_as_bucket_view": as_view},
                )  # fmt: skip
                also = ("GRAD-22",) if use == "tied" else ()
                yield scenario.replace(requirements=("CONS-26", *also))
    for world_size in (2, 3, 4):
        for suffix, options in (("", {}), ("-find-unused", {"find_unused_parameters": True})):
            yield _scenario("CONS-27", f"two-groups{suffix}", "subgroups", world_size, options=options)


def _users_errors() -> Iterator[Scenario]:
    for place in PLACES:
        for mode in MODES:
            for world_size in (1, 2, 3) if mode == "training" else (2,):
                yield _raising(place, mode, "", world_size)
        for suffix, options in (
            ("-view", {"gradient_as_bucket_view": True}),
            ("-find-unused", {"find_unused_parameters": True}),
            ("-static", {"static_graph": True}),
        ):
            yield _raising(place, "training", suffix, 2, options)


def _raising(place: str, mode: str, suffix: str, world_size: int, options: dict[str, bool] | None = None) -> Scenario:
    slug = f"users-errors-{place}-{mode.replace('_', '-')}{suffix}"
    arguments = {"place": place, "mode": mode}
    return _scenario("CONS-34", slug, "users_errors", world_size, options=options or {}, arguments=arguments)


def _circumstances() -> Iterator[Scenario]:
    ways: tuple[tuple[str, dict[str, bool], tuple[int, ...]], ...] = (
        ("", {}, (1, 2, 3)), ("-find-unused", {"find_unused_parameters": True}, (2,)),
        ("-static", {"static_graph": True}, (2,)), ("-view", {"gradient_as_bucket_view": True}, (2,)),
    )  # fmt: skip
    for name in CIRCUMSTANCES:
        for suffix, options, world_sizes in ways:
            for world_size in world_sizes:
                slug = f"{name.replace('_', '-')}{suffix}"
                arguments = {"circumstance": name}
                yield _scenario("CONS-35", slug, "circumstances", world_size, options=options, arguments=arguments)
