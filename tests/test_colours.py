"""Colours of roles, verdicts and text: told apart by colour-blind readers, and readable (WCAG 2 AA)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import pytest

import memfit.report
from memfit.report.bar import NCCL
from memfit.report.words import ROLE_WORDS, UNKNOWN, VERDICT_COLOURS

CSS = (Path(memfit.report.__file__).parent / "web" / "views.css").read_text(encoding="utf-8")
THEMES = [dict(re.findall(r"--(\w+): (#\w{6})", one)) for one in re.findall(r":root \{([^}]*)\}", CSS)]
AA, LEAST = 4.5, 11.0  # contrast of text; distance of two colours in CIE L*a*b*, of which 2.3 is just noticed
PARTS = {name: word.colour for name, word in ROLE_WORDS.items()} | {"?": UNKNOWN.colour, "nccl": NCCL.colour}
# what a reader sees of linear RGB, at full severity: Machado, Oliveira and Fernandes 2009, table 1
SEEN = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
TO_XYZ = ((0.4338, 0.3763, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8729))  # over D65's white


def linear(colour: str) -> list[float]:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares]


def times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((times(TO_XYZ, linear(colour))[1] for colour in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(colour: str, seen: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    x, y, z = (
        max(one, 0) ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116
        for one in times(TO_XYZ, times(seen, linear(colour)))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("reader", SEEN)
@pytest.mark.parametrize("colours", [PARTS, VERDICT_COLOURS], ids=["parts", "verdicts"])
def test_everybody_tells_the_colours_apart(colours: Mapping[str, str], reader: str) -> None:
    seen = SEEN[reader]
    near = {
        (a, b): distance for a, b in combinations(colours, 2)
        if (distance := math.dist(lab(colours[a], seen), lab(colours[b], seen))) < LEAST
    }  # fmt: skip
    assert not near


def test_text_is_read_on_every_ground_and_on_every_role() -> None:
    (ink,) = re.findall(r"\.bar text \{[^}]*fill: (#\w{6})", CSS)
    pairs = [(ink, colour) for colour in PARTS.values()]
    assert len(THEMES) == 2
    for theme in THEMES:
        pairs += [(theme[text], theme[on]) for text in ("ink", "dim", "accent") for on in ("ground", "box", "shade")]
    assert not [(pair, found) for pair in pairs if (found := contrast(*pair)) < AA]
