"""Command-line options that several subcommands share."""

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from conformance.suite import Selection

Decorated = Callable[..., Any]


class Jobs(click.ParamType[int]):
    """A number of lanes, or `auto`, which is 0 until the backend is known."""

    name = "N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail if it is none."""
        if value == "auto":
            return 0
        text = str(value)
        if not text.isdigit() or int(text) < 1:
            self.fail(f"{value!r} is neither auto nor a number of lanes, from 1 on", param, ctx)
        return int(text)


jobs_option = click.option(
    "--jobs", type=Jobs(), default="auto", show_default=True, metavar="N",
    help="Lanes with ranks of their own, side by side; auto: by processors and memory. 1 keeps the order.",
)  # fmt: skip


class NamedPath(click.Path):
    """A path as `pathlib.Path`, which an empty text is not: Python would take it for the working directory."""

    def __init__(self, *, exists: bool = False, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(exists=exists, file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; fail if `value` is empty."""
        if value == "":
            self.fail("an empty path; write . for the working directory", param, ctx)
        path = super().convert(value, param, ctx)
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                self.fail(f"{str(path)[:80]!r} ...: {error.strerror}", param, ctx)
        return path


def subject_options(function: Decorated) -> Decorated:
    """Add `--ddp`, `--backend` and `--no-native`."""
    for decorate in (
        click.option(
            "--no-native",
            is_flag=True,
            help="Do not run torch's own DDP beside the DDP under test, nor compare with it.",
        ),
        click.option(
            "--backend",
            default="gloo",
            show_default=True,
            help="gloo, nccl, an installed backend's name, or module:attr.",
        ),
        click.option(
            "--ddp", default="ddp_impl", show_default=True, help="DDP under test: ddp_impl, torch, or module:Class."
        ),
    ):
        function = decorate(function)
    return function


def selection_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add NAMES and the options that select scenarios; the function gets the `Selection` first."""

    @functools.wraps(function)
    def selecting(
        names: tuple[str, ...], chapter: tuple[str, ...], requirement: tuple[str, ...], world_size: tuple[int, ...],
        keyword: str, one_per_requirement: bool, **others: Any,
    ) -> None:  # fmt: skip
        function(Selection(names, chapter, requirement, world_size, keyword, one_per_requirement), **others)

    decorated: Callable[..., None] = selecting
    for decorate in (
        click.option(
            "--one-per-requirement",
            is_flag=True,
            help="Select the cheapest scenario of each requirement: a first look.",
        ),
        click.option("-k", "keyword", default="", metavar="TEXT", help="Select scenarios whose id contains TEXT."),
        click.option("--world-size", multiple=True, type=int, metavar="N", help="Select scenarios with N ranks."),
        click.option("--requirement", multiple=True, metavar="ID", help="Select scenarios that test this requirement."),
        click.option("--chapter", multiple=True, metavar="NAME", help="Select scenarios of this chapter."),
        click.argument("names", nargs=-1),
    ):
        decorated = decorate(decorated)
    return decorated
