"""Options of other tools are answered with the flag memfit has for them."""

from __future__ import annotations

import click
import pytest

from conftest import Ran
from memfit.cli.flags import MEANT_FLAGS
from memfit.cli.tree import app
from memfit.tables.adapters import ADAPTERS


def options(name: str) -> dict[str, click.Parameter]:
    return {flag: row for row in app.get_command(None, name).params for flag in row.opts}


@pytest.mark.parametrize("option", MEANT_FLAGS)
def test_the_hint_names_a_flag_that_the_command_takes(option: str, ran: Ran) -> None:
    flag, _, value = MEANT_FLAGS[option].partition(" ")
    name = next(name for name in ("plan", "train", "check") if flag in options(name))
    assert option not in options(name)
    code, out, err = ran(name, "smollm2-135m", option.replace("-", "_").replace("__", "--", 1), "4")
    assert (code, out) == (2, "")
    assert f"hint: use {MEANT_FLAGS[option]} instead; see: memfit {name} --help" in " ".join(err.split())
    known = ADAPTERS if flag == "--adapter" else (options(name)[flag].metavar or "").split("|")
    assert not value or value in known


@pytest.mark.parametrize("option", ["--learning-rat", "--nothing-like-it"])
def test_an_unknown_option_gets_the_usual_hint(option: str, ran: Ran) -> None:
    code, _, err = ran("train", "smollm2-135m", option, "4")
    assert code == 2 and "instead" not in err and "see: memfit train --help" in err
    assert ("--learning-rate" in err) == (option == "--learning-rat")


def test_a_command_without_the_flag_does_not_name_it(ran: Ran) -> None:
    code, _, err = ran("gpus", "--lr", "1")
    assert code == 2 and "--learning-rate" not in err
