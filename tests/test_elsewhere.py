"""Options of other tools are answered with memfit's own."""

from __future__ import annotations

import click
import pytest

from conftest import Ran
from memfit.cli.flags import MEANT_FLAGS
from memfit.cli.tree import command


def options(name: str) -> dict[str, click.Parameter]:
    return {flag: row for row in command().commands[name].params for flag in row.opts}


@pytest.mark.parametrize("option", MEANT_FLAGS)
def test_what_is_answered_is_what_memfit_takes(option: str, ran: Ran) -> None:
    flag, _, value = MEANT_FLAGS[option].partition(" ")
    name = next(name for name in ("plan", "train") if flag in options(name))
    assert option not in options(name)
    code, out, err = ran(name, "smollm2-135m", option.replace("-", "_").replace("__", "--", 1), "4")
    assert (code, out) == (2, "")
    assert f"hint: here it is {MEANT_FLAGS[option]}; see: memfit {name} --help" in " ".join(err.split())
    row = options(name)[flag]
    assert value in (row.metavar or "").split("|") if value else row


@pytest.mark.parametrize("option", ["--learning-rat", "--nothing-like-it"])
def test_the_rest_is_answered_as_ever(option: str, ran: Ran) -> None:
    code, _, err = ran("train", "smollm2-135m", option, "4")
    assert code == 2 and "here it is" not in err and "see: memfit train --help" in err
    assert ("--learning-rate" in err) == (option == "--learning-rat")


def test_a_command_without_the_flag_does_not_name_it(ran: Ran) -> None:
    code, _, err = ran("gpus", "--lr", "1")
    assert code == 2 and "--learning-rate" not in err
