"""Scenarios of chapter optimizer_in_backward: an optimizer steps each parameter once its gradient is averaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.chapters.optimizer_in_backward.hooked_parameters import HOOKS
from conformance.scenario import Scenario

_of_chapter = in_chapter("optimizer_in_backward")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.00001}
_NEEDS = ("optimizer_in_backward",)

_ALL = [["a b c d"]]
_THREE = [_ALL] * 3


def _scenario(
    requirement: str,
    slug: str,
    world_size: int,
    *,
    steps: Any = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Scenario:
    """Return a scenario of program `optimizer_in_backward`; `steps` are as the program reads them."""
    return _of_chapter(
        requirement, slug, "optimizer_in_backward", world_size, options=options or {}, needs=_NEEDS,
        arguments={"steps": steps or _THREE, **arguments},
    )  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _plain()
    yield from _choices()
    yield from _accumulating()
    yield from _fused()
    yield from _hooked()


def _plain() -> Iterator[Scenario]:
    for name in ("sgd", "momentum", "adam", "adamw", "rmsprop"):
        for world_size in (1, 2, 3, 4) if name in ("momentum", "adam") else (2, 3):
            scenario = _scenario("OPTIM-01", name, world_size, optimizers={"*": [name]})
            yield scenario.replace(requirements=("OPTIM-01", "OPTIM-02"))
    for world_size in (2, 3):
        yield _scenario("OPTIM-02", "never-zeroed", world_size, optimizers={"*": ["momentum"]}, zero_grad=False)
        for slug, options in (
            ("plain", {}), ("view", _VIEW), ("static", _STATIC), ("static-view", {**_STATIC, **_VIEW}),
        ):  # fmt: skip
            yield _scenario(
                "OPTIM-18", slug, world_size, options={**options, **_EACH_ALONE}, watch="a.weight",
                optimizers={"*": ["momentum"]},
            )  # fmt: skip
        yield _scenario("OPTIM-03", "kept", world_size, keep_gradients=True)
        yield _scenario("OPTIM-03", "kept-partly", world_size, keep_gradients=True, optimizers={"a": ["sgd"]})
        yield _scenario("OPTIM-04", "used-twice", world_size, steps=[[["a a b c d"]]] * 3, optimizers={"*": ["adam"]})
        yield _scenario("OPTIM-06", "after-wrapping", world_size, after=True, optimizers={"*": ["momentum"]})
    yield _scenario("OPTIM-03", "kept-view", 2, keep_gradients=True, options=_VIEW)
    yield _scenario("OPTIM-06", "after-wrapping-view", 2, after=True, options=_VIEW)
    for slug, options in (
        ("view", _VIEW), ("each-alone", _EACH_ALONE), ("view-each-alone", {**_VIEW, **_EACH_ALONE}),
        ("static", _STATIC), ("static-view", {**_STATIC, **_VIEW}), ("unused", _FIND),
    ):  # fmt: skip
        for world_size in (2, 3):
            yield _scenario("OPTIM-08", slug, world_size, options=options, optimizers={"*": ["momentum"]})
    for world_size in (2, 3):
        yield _scenario(
            "OPTIM-08", "view-never-zeroed", world_size, options=_VIEW, optimizers={"*": ["adam"]}, zero_grad=False
        )


def _choices() -> Iterator[Scenario]:
    for slug, optimizers in (("some", {"a": ["momentum"], "c": ["adam"]}), ("one", {"b": ["sgd"]})):
        for suffix, options in (("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE)):
            for world_size in (2, 3):
                if world_size == 2 or not options:
                    yield _scenario("OPTIM-05", f"{slug}{suffix}", world_size, options=options, optimizers=optimizers)
    for slug, optimizers in (
        ("each-its-own", {"a": ["momentum"], "b": ["adam"], "c": ["adamw"], "d": ["rmsprop"]}),
        ("two-each", {"*": ["momentum", "sgd"]}), ("two-on-one", {"a": ["sgd", "momentum"], "*": ["sgd"]}),
    ):  # fmt: skip
        for world_size in (2, 3):
            yield _scenario("OPTIM-07", slug, world_size, optimizers=optimizers)
    for suffix, options in (("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE)):
        for world_size in (2, 3):
            yield _of_chapter(
                "OPTIM-11", f"hook{suffix}", "optimizer_in_backward", world_size, options=options,
                needs=(*_NEEDS, "comm_hook"),
                arguments={"steps": _THREE, "hook": True, "optimizers": {"*": ["momentum"]}},
            )  # fmt: skip
    for slug, ignored in (("bias", ["a.bias"]), ("branch", ["c.weight", "c.bias"])):
        for world_size in (2, 3):
            yield _scenario("OPTIM-12", slug, world_size, ignored=ignored, optimizers={"*": ["momentum"]})
    for name in ("momentum", "adam"):
        for world_size in (2, 3):
            yield _scenario("OPTIM-13", name, world_size, halve_rates=True, optimizers={"*": [name]})
            yield _of_chapter(
                "OPTIM-14", name, "restarted_optimizer_in_backward", world_size, needs=_NEEDS,
                arguments={"optimizers": {"*": [name]}},
            )  # fmt: skip


def _accumulating() -> Iterator[Scenario]:
    local = ["local:a b c d"]
    for suffix, options in (("", {}), ("-view", _VIEW), ("-unused", _FIND)):
        for slug, steps in (
            ("last", [[local, *_ALL]] * 3), ("several", [_ALL, [local, local, *_ALL], _ALL]),
            ("alone", [_ALL, [local], _ALL]), ("first", [[local], [local, *_ALL], _ALL]),
        ):  # fmt: skip
            if slug in ("last", "alone") or not options:
                for world_size in (2, 3) if not options else (2,):
                    yield _scenario(
                        "OPTIM-09", f"{slug}{suffix}", world_size, steps=steps, options=options,
                        optimizers={"*": ["momentum"]}, zero_grad=slug not in ("alone", "first"), may_refuse=True,
                    )  # fmt: skip
    for suffix, options in (("", _FIND), ("-view", {**_FIND, **_VIEW}), ("-each-alone", {**_FIND, **_EACH_ALONE})):
        for world_size in (2, 3):
            yield _scenario(
                "OPTIM-10", f"by-rank{suffix}", world_size, options=options, optimizers={"*": ["momentum"]},
                steps=[[["a b", "b c"]], [["a", "c d"]], [["d"]], [["a b c d"]]],
            )  # fmt: skip
        yield _scenario(
            "OPTIM-10", f"nobody{suffix}", 2, options=options, optimizers={"*": ["adamw"]}, steps=[[["a b"]]] * 3
        )


def _fused() -> Iterator[Scenario]:
    for name in ("sgd", "momentum", "adam", "adamw"):
        for world_size in (2, 3):
            yield _fused_scenario(name, name, world_size)
    for suffix, options in (("-view", _VIEW), ("-each-alone", _EACH_ALONE)):
        yield _fused_scenario(f"momentum{suffix}", "momentum", 2, options=options)
    for only in ("a", "bd"):
        for world_size in (2, 3):
            yield _fused_scenario(f"only-{only}", "momentum", world_size, only=only)
    for world_size in (2, 3):
        yield _of_chapter(
            "OPTIM-16", "refused", "fused_optimizer_refusal", world_size, needs=("optimizer_in_backward",)
        )


def _fused_scenario(
    slug: str, optimizer: str, world_size: int, *, options: dict[str, Any] | None = None, **arguments: Any
) -> Scenario:
    return _of_chapter(
        "OPTIM-15", slug, "fused_optimizer", world_size, options=options or {}, needs=(*_NEEDS, "comm_hook"),
        arguments={"optimizer": optimizer, **arguments},
    )  # fmt: skip


def _hooked() -> Iterator[Scenario]:
    for hook in HOOKS:
        for suffix, options in (
            ("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE), ("-view-each-alone", {**_VIEW, **_EACH_ALONE}),
            ("-unused", _FIND), ("-static", _STATIC),
        ):  # fmt: skip
            for order in ("before", "after"):
                yield _of_chapter(
                    "OPTIM-17", f"{hook.replace('_', '-')}-{order}{suffix}", "hooked_parameters", 2, options=options,
                    arguments={"hook": hook, "order": order},
                )  # fmt: skip
