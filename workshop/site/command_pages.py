"""The reference of the command line, made from the commands themselves."""

import inspect
from collections.abc import Iterator, Mapping

import click

from conformance.report.markdown import as_code, as_text


def command_pages(main: click.Group) -> Mapping[str, str]:
    """Return a page in Markdown for `main` and each of its commands, by path."""
    context = click.Context(main, info_name="ddp-conformance")
    pages = {"cli/index.md": "\n".join([*_section(main, context, 1), *_commands(main, context)]) + "\n"}
    for name in main.list_commands(context):
        if (command := main.get_command(context, name)) is not None:
            pages[f"cli/{name}.md"] = "\n".join(_all(command, click.Context(command, context, name), 1)) + "\n"
    return pages


def _commands(main: click.Group, context: click.Context) -> Iterator[str]:
    yield from ("## Commands", "")
    for name in main.list_commands(context):
        yield f"- [{name}]({name}.md)"


def _all(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield from _section(command, context, level)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is not None:
                yield from _all(inner, click.Context(inner, context, name), level + 1)


def _section(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {context.command_path}", "")
    yield from ("```text", f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}", "```", "")
    yield from _help(command.help or "")
    if rows := [record for one in command.get_params(context) if (record := one.get_help_record(context))]:
        yield from ("| option | meaning |", "|---|---|")
        yield from (f"| {as_code(option)} | {as_text(meaning)} |" for option, meaning in rows)
        yield ""


def _help(text: str) -> Iterator[str]:
    """Yield a command's help: click's unwrapped paragraphs as code, the others as text."""
    for paragraph in inspect.cleandoc(text).replace("\f", "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```text", paragraph.removeprefix("\b").strip("\n"), "```", "")
        else:
            yield from (paragraph, "")
