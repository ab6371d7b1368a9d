"""The command tree: which commands there are, in the order people meet them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memfit import __version__
from memfit.cli import data, estimate, export, glossary, gpus, models, plan, techniques

Exit = typer.Exit
# ClickException, from wherever this typer has its click: the base of everything it says about a wrong command line
Misuse: Any = typer.BadParameter.__mro__[2]

COMMANDS = (plan, estimate, techniques, gpus, models, data, glossary, export)
EXAMPLE = "memfit plan meta-llama/Llama-3.1-8B --gpu rtx-4090"


def _examples(*lines: str) -> str:
    """An epilog that typer does not wrap."""
    return "\b\nexample:\n" + "\n".join(f"  {line}" for line in lines)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"memfit {__version__}")
        raise typer.Exit


def make() -> typer.Typer:
    """All commands."""
    app = typer.Typer(rich_markup_mode=None, add_completion=True, pretty_exceptions_enable=False)
    for module in COMMANDS:
        app.command(name=module.__name__.rsplit(".", 1)[-1], epilog=_examples(*module.EXAMPLES))(module.run)

    @app.callback(invoke_without_command=True, epilog=_examples(EXAMPLE))
    def top(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
        ] = False,
    ) -> None:
        """Will this fit on my GPU, and if not, what is the cheapest change that makes it fit?"""
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


def command() -> Any:
    """The tree that parses a command line."""
    return typer.main.get_command(make())
