"""The command tree: all commands, in the order in which people need them, each imported when it is named."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from memfit.cli.completion import completes
from memfit.cli.flags import TAKEN, Argument, Flag
from memfit.errors import BadInput

# name -> what it does; each is a module of this package, which is imported when its command is named
COMMANDS = {
    "plan": "Find the cheapest recipe that fits.",
    "estimate": "Estimate the memory of one recipe.",
    "page": "Open a local page that answers as the commands do.",
    "trace": "Run real training code on a virtual GPU.",
    "train": "Fine-tune a model, and survive running out of memory.",
    "watch": "Watch a run's memory live.",
    "check": "Keep a repository's jobs within their cards.",
    "diff": "Say what an upgrade changes: the same job in two environments.",
    "compare": "Compare two runs: what differs, by role and phase.",
    "techniques": "Show what each technique saves in this run.",
    "sweep": "Map the headroom over one or two fields of a recipe.",
    "replay": "Replay a saved tape or snapshot on another card.",
    "explain": "Explain why memory ran out and what to change.",
    "gpus": "List GPUs and the largest model each trains.",
    "models": "List the models in memfit's catalogue, which need no network.",
    "data": "Count the tokens of a training file.",
    "glossary": "Explain the words memfit prints.",
    "export": "Write a recipe as another framework's files.",
    "launch": "Write a recipe as a job for a cluster.",
    "mcp": "Serve agents over the Model Context Protocol.",
    "cache": "Show the folder that keeps the answers of traces.",
    "doctor": "Say what is installed, and whether all is in order.",
}
EXAMPLE = "memfit plan meta-llama/Llama-3.1-8B --gpu rtx-4090"


def _examples(*lines: str) -> str:
    """Return the examples as an epilog that click does not wrap."""
    return f"\b\nexample{'s' * (len(lines) > 1)}:\n" + "\n".join(f"  {line}" for line in lines)


def _option(row: Flag) -> click.Option:
    if row.kind is bool:
        words = row.flag if row.default is False else f"{row.flag}/{row.off}"  # default None: it can be switched off
        return click.Option([words, row.parameter], is_flag=True, default=row.default, help=row.help)
    return click.Option(
        [row.flag, row.parameter], type=_reader(row), default=row.default, metavar=row.metavar or None, help=row.help,
        multiple=row.many, shell_complete=completes(row.name, row),
    )  # fmt: skip


def _reader(row: Flag) -> Callable[[str], Any]:
    """Return click's type of a flag's value; an error of memfit's own parsers names the flag."""
    if isinstance(row.kind, type):
        return row.kind

    def read(text: str) -> Any:
        try:
            return row.kind(text)
        except BadInput as error:
            raise BadInput(f"{row.flag}: {error.message}", hint=error.hint) from None

    return read


def _argument(row: Argument) -> click.Argument:
    metavar = row.metavar if row.required else f"[{row.metavar}]"
    return click.Argument([row.name], required=row.required, nargs=-1 if row.many else 1, metavar=metavar,
                          shell_complete=completes(row.name))  # fmt: skip


def _command(name: str) -> click.Command:
    module = import_module(f"memfit.cli.{name}")
    rows, argument = TAKEN[module.run]
    text = inspect.getdoc(module.run) or ""
    if argument:
        text += f"\n\n{argument.metavar} is {argument.help}."
    kind = _BeforeCommand if argument and argument.command else click.Command
    return kind(
        name, callback=module.run, help=text, epilog=_examples(*module.EXAMPLES),
        params=[*([_argument(argument)] if argument else []), *map(_option, rows)],
    )  # fmt: skip


class _BeforeCommand(click.Command):
    """A command of memfit with another program's command line behind `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        if "-m" in args[:at]:
            where = args.index("-m")
            module, others = args[where : where + 2], [*args[:where], *args[where + 2 : at]]
            typed = ["memfit", self.name or "", *others, "--", "python", *module, *args[at + 1 :]]
            raise BadInput("-m is Python's: name the whole command", hint=shlex.join(typed))
        rest = super().parse_args(ctx, args[:at])
        ctx.params["command"] = tuple(args[at + 1 :])
        return rest


def _show_versions(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from memfit.cli.installation import versions

        click.echo("\n".join(f"{name} {version}" for name, version in versions().items()))
        context.exit()


class Commands(click.Group):
    """The commands of COMMANDS, in that order. The list of them imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group("memfit", cls=Commands, invoke_without_command=True, epilog=_examples(EXAMPLE))
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show the versions that answers depend on, and exit.",
)
@click.pass_context
def app(context: click.Context) -> None:
    """Will this fit on my GPU, and if not, what is the cheapest change that makes it fit?"""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
