"""The map of headroom: its cells are those of `memfit estimate`, its pictures and tables hold all of them."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import Ran
from memfit import Recipe, find_gpu, resolve_model
from memfit.documents import codec
from memfit.documents.sweep_doc import sweep_csv
from memfit.nouns.sweep import Axis, Sweep
from memfit.planner.sweep import sweep
from memfit.report.heat_map import colour_of, heat_map_svg
from memfit.units import parse_length

MODEL, CARD = "qwen2.5-0.5b", "rtx-4060"
RUN = ("sweep", MODEL, "--gpu", CARD)
LENGTHS, BATCHES = ("512..4k", (512, 1024, 2048, 4096)), ("1,3..5:2", (1, 3, 5))
SVG = "{http://www.w3.org/2000/svg}"


def swept(base: Recipe, axes: tuple[Axis, ...]) -> Sweep:
    gpu = find_gpu(CARD)
    return sweep(resolve_model(MODEL), base, gpu, axes, lambda values: (base.but(**values), gpu))


@pytest.fixture(scope="module")
def found() -> Sweep:
    axes = (Axis("sequence_length", LENGTHS[1]), Axis("micro_batch", BATCHES[1]))
    return swept(Recipe(loss="fused"), axes)


@pytest.mark.parametrize(
    ("words", "axes"),
    [
        (("--gpu", CARD, "--host-memory", "6GiB"), {"sequence-length": LENGTHS, "micro-batch": ("1,16", (1, 16))}),
        ((), {"gpu": ("v100-16gb,2xrtx-4060", ("v100-16gb", "2xrtx-4060")), "method": ("full,qlora",) * 2}),
        (("--gpu", CARD, "--from", "zero.json"), {"num-gpus": ("1..2", (1, 2)), "shard": ("none,gradients",) * 2}),
        (("--gpu", "h100", "--reserve", "70GiB"), {"compile": ("no,yes", ("no", "yes"))}),
    ],
)
def test_every_cell_says_what_estimate_says(
    ran: Ran,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    axes: dict[str, tuple[str, object]],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero.json").write_text(
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
    )
    over = [word for name, (text, _) in axes.items() for word in ("--over", f"{name}={text}")]
    document = codec.loads(ran("sweep", MODEL, *words, *over, "--json")[1])
    values = [list(v.split(",") if isinstance(v, str) else v) for _, v in axes.values()]  # type: ignore[call-overload]
    combinations = [c[::-1] for c in product(*reversed(values))]
    assert len(document.cells) == len(combinations)
    for cell, combination in zip(document.cells, combinations, strict=True):
        asked = [w for name, v in zip(axes, combination, strict=True) for w in (f"--{name}", str(v))]
        if "compile" in axes:
            asked = ["--compile" if combination[0] == "yes" else "--no-compile"]
        code, out, err = ran("estimate", MODEL, *words, *asked, "--json")
        if code == 2:
            assert cell.refused and f"error: {cell.refused}" in err
            continue
        same = codec.loads(out)
        for name in ("recipe", "verdict", "fits", "need", "usable", "band", "headroom", "host", "peak"):
            assert getattr(cell, name) == getattr(same, name), (name, combination)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(method="lora", checkpointing="full")])
def test_more_tokens_never_need_less(recipe: Recipe) -> None:
    """Requested bytes, which no allocator blurs; the verdict never gets better."""
    axes = (Axis("sequence_length", (512, 1500, 2048)), Axis("micro_batch", (1, 2, 3, 6)))
    rows = swept(recipe, axes).rows
    rank = ("fits", "tight", "misfit").index
    for line in (*rows, *zip(*rows, strict=True)):
        levels = [cell.levels.requested for cell in line if cell.levels]
        assert levels == sorted(set(levels)) and len(levels) == len(line)
        verdicts = [rank(cell.verdict) for cell in line]
        assert verdicts == sorted(verdicts)


@pytest.mark.parametrize("alone", [False, True])
def test_the_picture_holds_every_cell_and_the_edge(found: Sweep, alone: bool) -> None:
    root = ElementTree.fromstring(heat_map_svg(found, alone=alone))
    assert (found.gpu.name in "".join(label.text or "" for label in root.findall(f"{SVG}text"))) == alone
    cells = root.findall(f"{SVG}g")
    over = [dict(pair.split("=") for pair in cell.get("data-over", "").split(",")) for cell in cells]
    assert [{k: int(v) for k, v in each.items()} for each in over] == [found.values(i) for i in range(len(found.cells))]
    for drawn, cell in zip(cells, found.cells, strict=True):
        assert drawn.get("class") == f"cell {cell.verdict}"
        assert drawn.find(f"{SVG}rect").get("fill") == colour_of(cell)  # type: ignore[union-attr]
        assert len((drawn.findtext(f"{SVG}title") or "").splitlines()) == 3
    fits = [[cell.verdict == "fits" for cell in row] for row in found.rows]
    pairs = [pair for line in (*fits, *zip(*fits, strict=True)) for pair in pairwise(line)]
    path = next(p.get("d", "") for p in root.findall(f"{SVG}path"))
    assert path.count("M") == sum(a != b for a, b in pairs) > 0


def test_forked_processes_find_the_same(ran: Ran, monkeypatch: pytest.MonkeyPatch, found: Sweep) -> None:
    monkeypatch.setattr("memfit.cli.forked._cores", lambda: 2)
    monkeypatch.setattr("memfit.cli.forked.FEW", 2)
    over = (f"sequence-length={LENGTHS[0]}", f"micro-batch={BATCHES[0]}")
    assert ran(*RUN, "--over", over[0], "--over", over[1], "--csv")[1] == sweep_csv(found)


def test_a_hostile_name_is_text(found: Sweep) -> None:
    named = replace(found.architecture, name='"><script onload="x">&\x1b]0;')
    drawn = heat_map_svg(replace(found, architecture=named), alone=True)
    elements = list(ElementTree.fromstring(drawn).iter())
    assert {element.tag for element in elements} <= {SVG + tag for tag in ("svg", "g", "title", "rect", "text", "path")}
    assert not [key for element in elements for key in element.attrib if key == "style" or key.startswith("on")]
    assert "\x1b" not in drawn


def test_csv_has_a_line_for_each_cell(found: Sweep) -> None:
    rows = list(csv.DictReader(io.StringIO(sweep_csv(found))))
    assert [int(row["headroom"]) for row in rows] == [c.judgement.headroom for c in found.cells if c.judgement]
    assert [row["verdict"] for row in rows] == [c.verdict for c in found.cells]


def test_the_exit_code_is_that_of_the_best_cell(ran: Ran, tmp_path: Path) -> None:
    assert ran(*RUN, "--over", "micro-batch=1,64")[0] == 0
    assert ran(*RUN, "--over", "micro-batch=64")[0] == 3
    file = tmp_path / "axolotl.yaml"
    file.write_text("base_model: Qwen/Qwen2.5-0.5B\nmicro_batch_size: 1\nsequence_len: 512\nno_such_key: 3\n")
    code, out, _ = ran("sweep", "--from", file, "--gpu", CARD, "--over", "micro-batch=1,2", "--json")
    assert code == 5 and {cell["verdict"] for cell in json.loads(out)["cells"]} == {"not_judged"}


@pytest.mark.parametrize(
    "words",
    [
        (), ("--over", "shard=none..parameters"), ("--over", "micro-batch"), ("--over", "micro-batch=0..4"),
        ("--over", "micro-batch=4..1"), ("--over", "micro-batch=1..9:0"), ("--over", "micro-batch=1..x"),
        ("--over", "micro-batch=1..1000000000:1"), ("--over", "max-seq-length=1k"), ("--over", "colour=1"),
        ("--over", "micro-batch=1", "--over", "micro_batch=2"), ("--over", "micro-batch=1", "--micro-batch", "2"),
        ("--over", "gpu=h100"), ("--over", "method=lorra"), ("--over", "lora-rank=1..8"), ("--over", "compile=so"),
        ("--over", "sequence-length=1k..40k:1k", "--over", "micro-batch=1..40:1"),
        ("--over", "shard=gradients,parameters"), ("--over", "micro-batch=1", "--json", "--csv"),
        ("--over", "num-gpus=1,8", "--gpu", "8xh100"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_with_a_hint(ran: Ran, words: tuple[str, ...]) -> None:
    code, out, err = ran(*RUN, *words)
    error, hint = err.splitlines()[-2:]
    assert (code, out) == (2, "") and error.startswith("error: ") and re.match(r"hint: \S", hint)
    if "=" in hint and hint.startswith("hint: --over"):
        assert ran(*RUN, *hint.removeprefix("hint: ").split(",")[0].split()[:2], "--json")[0] in (0, 3)


@pytest.mark.parametrize("words", [("qwen2.5-0.5b", "--task", "grpo"), ("whisper-small",)], ids=str)
def test_a_length_that_decides_nothing_is_no_axis(ran: Ran, words: tuple[str, ...]) -> None:
    """Every cell of a row said the same of 512 tokens as of 128k."""
    code, _, err = ran("sweep", *words, "--gpu", CARD, "--over", "sequence-length=1k,2k")
    assert code == 2 and "no effect" in err
    hint = err.splitlines()[-1].removeprefix("hint: ").split()
    assert ran("sweep", *words, "--gpu", CARD, *hint, "--csv")[0] == 0


@pytest.mark.parametrize(
    "words", [("stable-diffusion-v1-5",), ("qwen2.5-0.5b", "--task", "token-classification")], ids=str
)
def test_what_only_a_trace_answers_is_refused(ran: Ran, words: tuple[str, ...]) -> None:
    code, _, err = ran("sweep", *words, "--gpu", "h100", "--over", "micro-batch=1")
    assert code == 2 and "memfit plan" in err.splitlines()[-1]


@pytest.mark.parametrize("tokens", [1, 1000, 1024, 3 << 10, 131072, 1 << 20])
def test_a_short_length_is_read_back(tokens: int) -> None:
    from memfit.units import short_length

    assert parse_length(short_length(tokens)) == tokens
