"""Scenarios of chapter join: ranks with data go on training, and all ranks end with one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.chapters.join.accidents import CASES
from conformance.models.catalogue import get_fixture
from conformance.own_mistake import certain
from conformance.scenario import Scenario

_of_chapter = in_chapter("join")

#: World size -> numbers of inputs by rank: the last rank has most, rank 0 has most, and ranks without any input.
UNEVEN: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((2, 4), (4, 2), (0, 3), (3, 0)),
    3: ((1, 2, 4), (4, 1, 1), (0, 3, 2)),
    4: ((1, 2, 3, 4), (4, 3, 3, 1), (0, 0, 2, 3)),
}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_SMALL: dict[str, Any] = {"bucket_cap_mb": 0.0005}


def _scenario(requirement: str, slug: str, program: str, world_size: int, **rest: Any) -> Scenario:
    # A rank that waits for one that has joined waits for ever.
    return _of_chapter(requirement, slug, program, world_size, needs=("join",), deadline_s=8.0, **rest)


def _train(requirement: str, slug: str, model: str, inputs: tuple[int, ...], **rest: Any) -> Scenario:
    """Return a scenario of program `uneven_training`; `options` are the wrapper's, what is left the plan's."""
    options = {**(_FIND if get_fixture(model).has_unused else {}), **rest.pop("options", {})}
    return _scenario(
        requirement, f"{slug}-{''.join(map(str, inputs))}", "uneven_training", len(inputs), model=model,
        options=options, dtype=get_fixture(model).dtypes[0], arguments={"num_inputs": list(inputs), **rest},
    )  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _divisors()
    yield from _buffers()
    yield from _features()
    yield from _company()
    yield from _contexts()


def _divisors() -> Iterator[Scenario]:
    effective = {"divide_by_initial_world_size": False}
    for world_size, distributions in UNEVEN.items():
        for inputs in distributions:
            started = min(inputs) > 0
            both = ("JOIN-01", "JOIN-03") if started else ("JOIN-01", "JOIN-03", "JOIN-09")
            yield _train("JOIN-01" if started else "JOIN-09", "mlp", "mlp", inputs).replace(requirements=both)
            yield _train("JOIN-02", "mlp", "mlp", inputs, **effective)
        for model in ("batchnorm_mlp", "many_small_layers"):
            yield _train("JOIN-03", model.replace("_", "-"), model, distributions[0])
        even = (3,) * world_size
        yield _train("JOIN-10", "mlp", "mlp", even)
        yield _train("JOIN-10", "mlp-effective", "mlp", even, **effective)
    yield _train("JOIN-10", "mlp", "mlp", (3,))
    yield _train("JOIN-10", "mlp-static", "mlp", (3,), options=_STATIC)
    for model in ("cnn", "gpt"):
        yield _train("JOIN-01", model, model, (1, 2))


def _buffers() -> Iterator[Scenario]:
    for world_size, distributions in UNEVEN.items():
        for inputs in distributions:
            slug = "".join(map(str, inputs))
            for synchronised in (True, False):
                scenario = _scenario(
                    "JOIN-04" if synchronised else "JOIN-05", f"{'marked' if synchronised else 'local'}-{slug}",
                    "uneven_buffers", world_size, arguments={"num_inputs": list(inputs)},
                    options={"broadcast_buffers": synchronised},
                )  # fmt: skip
                yield scenario.replace(requirements=("JOIN-04", "JOIN-05") if synchronised else ("JOIN-05",))
        yield _scenario(
            "JOIN-05", "even", "uneven_buffers", world_size, arguments={"num_inputs": [2] * world_size},
        )  # fmt: skip

    for location in ("PRE_FORWARD", "POST_FORWARD"):
        for inputs in ((1, 2), (2, 1), (1, 2, 3)):
            slug = f"{location.lower().replace('_', '-')}-{''.join(map(str, inputs))}"
            yield _scenario("JOIN-28", slug, "buffer_hook_in_join", len(inputs),
                            arguments={"location": location, "num_inputs": list(inputs)})  # fmt: skip


def _features() -> Iterator[Scenario]:
    for distributions in UNEVEN.values():
        for inputs in distributions[:3]:
            yield _train("JOIN-11", "mlp", "mlp", tuple(count + 2 for count in inputs), sync_every=2)
            yield _train("JOIN-15", "small-buckets", "many_small_layers", inputs, options=_SMALL)
            yield _train("JOIN-12", "moe", "moe", inputs)
            yield _train("JOIN-12", "rank-branch", "rank_branch", inputs)
            yield _train("JOIN-13", "mlp", "mlp", inputs, options=_STATIC)
            yield _train("JOIN-14", "mlp", "mlp", inputs, options=_VIEW)
        inputs = distributions[0]
        longer = tuple(3 + 2 * count for count in inputs)
        yield _train("JOIN-11", "three-micro-batches", "mlp", longer, sync_every=3)
        yield _train("JOIN-11", "view", "mlp", longer, sync_every=2, options=_VIEW)
        yield _train("JOIN-11", "unused", "moe", longer, sync_every=2)
        yield _train("JOIN-12", "skipped", "moe", inputs, options={"skip_all_reduce_unused_params": True})
        yield _train("JOIN-12", "two-heads", "two_heads", inputs, divide_by_initial_world_size=False)
        yield _train("JOIN-13", "unused", "unused", inputs, options={**_STATIC, "find_unused_parameters": False})
        yield _train("JOIN-13", "buckets", "many_small_layers", distributions[2], options={**_STATIC, **_SMALL})
        yield _train("JOIN-14", "unused", "moe", inputs, options=_VIEW)
        yield _train("JOIN-14", "buckets", "many_small_layers", distributions[1], options={**_VIEW, **_SMALL})
        yield _train("JOIN-15", "small-buckets-effective", "many_small_layers", inputs, options=_SMALL,
                     divide_by_initial_world_size=False)  # fmt: skip
        yield _train("JOIN-16", "doubling", "mlp", inputs, hook=True)
        yield _train("JOIN-16", "buckets", "many_small_layers", distributions[2], hook=True, options=_SMALL)
        for model in ("mixed_dtypes", "complex", "sparse_embedding"):
            yield _train("JOIN-17", model.replace("_", "-"), model, distributions[1])


def _company() -> Iterator[Scenario]:
    for world_size, distributions in UNEVEN.items():
        for inputs in distributions[:2]:
            yield _train("JOIN-18", "zero", "mlp", inputs, optimizer="zero")
            for effective in (False, True):
                for requirement, joinables in (
                    ("JOIN-19", ["ddp", "ddp"]), ("JOIN-20", ["counter", "ddp"]), ("JOIN-20", ["ddp", "counter"]),
                ):  # fmt: skip
                    slug = f"{'-'.join(joinables)}-{''.join(map(str, inputs))}{'-effective' * effective}"
                    yield _scenario(
                        requirement, slug, "shared_join", world_size,
                        arguments={
                            "joinables": joinables, "num_inputs": list(inputs),
                            "divide_by_initial_world_size": not effective,
                        },
                    )  # fmt: skip
        yield _train("JOIN-18", "even", "mlp", (2,) * world_size, optimizer="zero")
        yield _train("JOIN-18", "view", "mlp", distributions[0], optimizer="zero", options=_VIEW)


def _contexts() -> Iterator[Scenario]:
    for world_size, distributions in UNEVEN.items():
        inputs = distributions[0]
        for effective in (False, True):
            yield _train("JOIN-21", f"again{'-effective' * effective}", "mlp", inputs, contexts=2, even_steps=2,
                         divide_by_initial_world_size=not effective)  # fmt: skip
        yield _train("JOIN-21", "again-buckets", "many_small_layers", distributions[1], contexts=2, even_steps=1,
                     options=_SMALL)  # fmt: skip
        yield _train("JOIN-22", "mlp", "mlp", inputs, evaluate=True)
        yield _train("JOIN-22", "even", "mlp", (2,) * world_size, evaluate=True)
        for communicates in (False, True):
            for counts in (inputs, distributions[1]):
                slug = f"{'communicating' if communicates else 'layers'}-{''.join(map(str, counts))}"
                yield _scenario(
                    "JOIN-07", slug, "early_termination", world_size,
                    arguments={"num_inputs": list(counts), "contexts": 2, "communicates": communicates},
                )  # fmt: skip
        yield _scenario("JOIN-08", "even", "early_termination", world_size,
                        arguments={"num_inputs": [2] * world_size, "contexts": 2})  # fmt: skip
    cases = {"exception": "JOIN-23", "transparent": "JOIN-06", "logged": "JOIN-25", "different_groups": "JOIN-26",
             "properties": "JOIN-27"}  # fmt: skip
    certain({*cases, "copied"} == set(CASES), "every case is tried")
    for case, requirement in cases.items():
        for world_size in (2, 3):
            yield _scenario(requirement, case.replace("_", "-"), "join_case", world_size, arguments={"case": case})
    for copying in ("deepcopy", "pickle"):
        for world_size in (2, 3):
            yield _scenario("JOIN-24", copying, "join_case", world_size,
                            arguments={"case": "copied", "copy": copying})  # fmt: skip
