"""Scenarios of chapter join: ranks with data continue to train, and all ranks end with one model."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Grid
from conformance.chapters.join.accidents import CASES
from conformance.chapters.variants import (
    ENDS_SOON,
    NO_UNUSED,
    SKIPPING,
    STATIC,
    VIEW,
    Variant,
    arguments,
    capped,
    dashed,
    each,
    fields,
    model,
    options,
)
from conformance.errors import certain
from conformance.scenario import Scenario

# A rank that waits for one that has joined waits for ever.
_grid = Grid("join", ENDS_SOON | Variant(needs=("join",)))

Inputs = tuple[int, ...]
#: World size -> numbers of inputs by rank: the last rank has most, rank 0 has most, and ranks without any input.
UNEVEN: dict[int, tuple[Inputs, ...]] = {
    2: ((2, 4), (4, 2), (0, 3), (3, 0)),
    3: ((1, 2, 4), (4, 1, 1), (0, 3, 2)),
    4: ((1, 2, 3, 4), (4, 3, 3, 1), (0, 0, 2, 3)),
}
_SMALL = capped("small", 0.0005)
_INITIAL = arguments(divide_by_initial_world_size=True)
_EFFECTIVE = arguments("effective", divide_by_initial_world_size=False)


def _given(inputs: Inputs) -> Variant:
    return arguments("".join(map(str, inputs)), num_inputs=list(inputs)).at(len(inputs))


def _train(requirement: str, slug: str, name: str, inputs: Inputs, *ways: Variant, **rest: Any) -> Iterator[Scenario]:
    unnamed = (way.named("") for way in (model(name), *ways))
    yield from _grid(requirement, slug, "uneven_training", (), *unnamed, _given(inputs), **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _divisors()
    yield from _buffers()
    yield from _features()
    yield from _company()
    yield from _contexts()


def _divisors() -> Iterator[Scenario]:
    for world_size, distributions in UNEVEN.items():
        for inputs in distributions:
            if min(inputs) > 0:
                yield from _train("JOIN-01", "mlp", "mlp", inputs, also=("JOIN-03",))
            else:
                shown = ("JOIN-01", "JOIN-03", "JOIN-09")
                yield from _train("JOIN-09", "mlp", "mlp", inputs, requirements=shown)
            yield from _train("JOIN-02", "mlp", "mlp", inputs, _EFFECTIVE)
        for name in ("batchnorm_mlp", "many_small_layers"):
            yield from _train("JOIN-03", dashed(name), name, distributions[0])
        even = (3,) * world_size
        yield from _train("JOIN-10", "mlp", "mlp", even)
        yield from _train("JOIN-10", "mlp-effective", "mlp", even, _EFFECTIVE)
    yield from _train("JOIN-10", "mlp", "mlp", (3,))
    yield from _train("JOIN-10", "mlp-static", "mlp", (3,), STATIC)
    for name in ("cnn", "gpt"):
        yield from _train("JOIN-01", name, name, (1, 2))


def _buffers() -> Iterator[Scenario]:
    marked, local = options(broadcast_buffers=True), options(broadcast_buffers=False)
    for world_size, distributions in UNEVEN.items():
        for inputs in map(_given, distributions):
            yield from _grid("JOIN-04", "marked", "uneven_buffers", (), inputs, marked, also=("JOIN-05",))
            yield from _grid("JOIN-05", "local", "uneven_buffers", (), inputs, local)
        yield from _grid("JOIN-05", "even", "uneven_buffers", (), _given((2,) * world_size).named(""))
    for location in ("PRE_FORWARD", "POST_FORWARD"):
        where = arguments(dashed(location.lower()), location=location)
        inputs_of_each = [_given(inputs) for inputs in ((1, 2), (2, 1), (1, 2, 3))]
        yield from _grid("JOIN-28", "", "buffer_hook_in_join", (), where, inputs_of_each)


def _features() -> Iterator[Scenario]:
    by_two, by_three = arguments(sync_every=2), arguments(sync_every=3)
    hook = arguments(hook=True)
    for distributions in UNEVEN.values():
        for inputs in distributions[:3]:
            yield from _train("JOIN-11", "mlp", "mlp", tuple(count + 2 for count in inputs), by_two)
            yield from _train("JOIN-11", "buffers", "batchnorm_mlp", tuple(count + 2 for count in inputs), by_two)
            yield from _train("JOIN-15", "small-buckets", "many_small_layers", inputs, _SMALL)
            yield from _train("JOIN-12", "moe", "moe", inputs)
            yield from _train("JOIN-12", "rank-branch", "rank_branch", inputs)
            yield from _train("JOIN-13", "mlp", "mlp", inputs, STATIC)
            yield from _train("JOIN-14", "mlp", "mlp", inputs, VIEW)
        inputs = distributions[0]
        longer = tuple(3 + 2 * count for count in inputs)
        yield from _train("JOIN-11", "three-micro-batches", "mlp", longer, by_three)
        yield from _train("JOIN-11", "view", "mlp", longer, by_two, VIEW)
        yield from _train("JOIN-11", "unused", "moe", longer, by_two)
        yield from _train("JOIN-12", "moe-effective", "moe", inputs, _EFFECTIVE)
        yield from _train("JOIN-12", "rank-branch-effective", "rank_branch", inputs, _EFFECTIVE)
        yield from _train("JOIN-12", "skipped", "moe", inputs, SKIPPING)
        yield from _train("JOIN-12", "two-heads", "two_heads", inputs, _EFFECTIVE)
        yield from _train("JOIN-13", "unused", "unused", inputs, STATIC, NO_UNUSED)
        yield from _train("JOIN-13", "buckets", "many_small_layers", distributions[2], STATIC, _SMALL)
        yield from _train("JOIN-14", "unused", "moe", inputs, VIEW)
        yield from _train("JOIN-14", "buckets", "many_small_layers", distributions[1], VIEW, _SMALL)
        yield from _train("JOIN-15", "small-buckets-effective", "many_small_layers", inputs, _SMALL, _EFFECTIVE)
        yield from _train("JOIN-16", "doubling", "mlp", inputs, hook)
        yield from _train("JOIN-16", "buckets", "many_small_layers", distributions[2], hook, _SMALL)
        for name in ("mixed_dtypes", "complex", "sparse_embedding"):
            yield from _train("JOIN-17", dashed(name), name, distributions[1])
        double = fields(dtype="float64")
        yield from _train("JOIN-17", "sparse-double", "sparse_embedding", distributions[1], double)


def _company() -> Iterator[Scenario]:
    zero = arguments(optimizer="zero")
    companies = (("JOIN-19", ["ddp", "ddp"]), ("JOIN-20", ["counter", "ddp"]), ("JOIN-20", ["ddp", "counter"]))
    for world_size, distributions in UNEVEN.items():
        for inputs in distributions[:2]:
            yield from _train("JOIN-18", "zero", "mlp", inputs, zero)
            for divisor in (_INITIAL, _EFFECTIVE):
                for requirement, joinables in companies:
                    joined = arguments("-".join(joinables), joinables=joinables)
                    yield from _grid(requirement, "", "shared_join", (), joined, _given(inputs), divisor)
        yield from _train("JOIN-18", "even", "mlp", (2,) * world_size, zero)
        yield from _train("JOIN-18", "view", "mlp", distributions[0], zero, VIEW)


def _contexts() -> Iterator[Scenario]:
    evaluating, twice = arguments(evaluate=True), arguments(contexts=2)
    for world_size, distributions in UNEVEN.items():
        inputs, even = distributions[0], (2,) * world_size
        again = twice | arguments(even_steps=2)
        yield from _train("JOIN-21", "again", "mlp", inputs, again, _INITIAL)
        yield from _train("JOIN-21", "again-effective", "mlp", inputs, again, _EFFECTIVE)
        again = twice | arguments(even_steps=1)
        yield from _train("JOIN-21", "again-buckets", "many_small_layers", distributions[1], again, _SMALL)
        yield from _train("JOIN-22", "mlp", "mlp", inputs, evaluating)
        yield from _train("JOIN-22", "even", "mlp", even, evaluating)
        kinds = (arguments("layers", communicates=False), arguments("communicating", communicates=True))
        both = [_given(counts) for counts in (inputs, distributions[1])]
        yield from _grid("JOIN-07", "", "early_termination", (), kinds, both, twice)
        yield from _grid("JOIN-08", "even", "early_termination", (), _given(even).named(""), twice)
    cases = {
        "exception": "JOIN-23",
        "transparent": "JOIN-06",
        "logged": "JOIN-25",
        "different_groups": "JOIN-26",
        "properties": "JOIN-27",
    }
    certain({*cases, "copied"} == set(CASES), "every case is tried")
    for case, requirement in cases.items():
        yield from _grid(requirement, "", "join_case", (2, 3), each("case", [case]))
    copies = each("copy", ("deepcopy", "pickle"))
    yield from _grid("JOIN-24", "", "join_case", (2, 3), copies, arguments(case="copied"))
