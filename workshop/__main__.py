"""`python -m workshop`, in a checkout: renews generated pages, and makes those that need runs."""

from typing import Any

import click

from conformance.cli import UsageError
from conformance.errors import ConformanceError
from workshop.freeze import command as freeze
from workshop.make_scoreboard import command as scoreboard
from workshop.renew import command as renew
from workshop.site.build import command as site
from workshop.torch_versions import command as versions


class Workshop(click.Group):
    """Prints an error of the harness as one paragraph."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except ConformanceError as error:
            raise UsageError(str(error)) from error


@click.group("workshop", cls=Workshop, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Make what this repository contains and nobody writes by hand.

    \b
    python -m workshop renew          rewrite the generated pages of this checkout
    python -m workshop scoreboard     make one table of several DDPs' reports
    python -m workshop versions FOLDER make the page about runs on several versions of torch
    python -m workshop freeze VERSION write which requirements a version of the specification holds
    python -m workshop site FOLDER    write the pages of the site, for mkdocs: bash ci/site.sh
    """


for one in (renew, scoreboard, versions, freeze, site):
    main.add_command(one)

if __name__ == "__main__":
    main(prog_name="python -m workshop")
