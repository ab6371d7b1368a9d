"""Views: arithmetic that adds up, lines that fit any width, plain text in pipes, and words that are all explained."""

from __future__ import annotations

import io
import re
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

import memfit
from memfit import Job, Recipe, estimate, find_gpu, make_plan, resolve_model
from memfit.catalogue import config, entries
from memfit.catalogue.cards import list_gpus
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import closed_form
from memfit.closed_form.task_runs import by_formula as formula_counts
from memfit.closed_form.why import explain
from memfit.data.lengths import Lengths
from memfit.errors import UnknownName, Unsupported
from memfit.models.families import architecture
from memfit.nouns.footprint import Footprint, Levels, Line, PhasePeak
from memfit.nouns.job import RECIPE_FIELDS, Checkpointing, Loss, Method, Offload, Precision, Quantization, Shard
from memfit.nouns.plan import Judgement, Plan, Rung, judge
from memfit.nouns.sweep import Axis
from memfit.nouns.tape import PHASES, ROLES
from memfit.planner import techniques
from memfit.planner.good_for import RECIPES, VENDORS, GpuRow, good_for, recipe_for
from memfit.planner.sweep import sweep
from memfit.report.bar import BarPart, StackedBar, cells, shares
from memfit.report.dataset import DatasetFacts, dataset_view
from memfit.report.estimate import arithmetic, estimate_view, why_view
from memfit.report.heat_map import heat_map_view
from memfit.report.plan import costs, plan_view, techniques_view
from memfit.report.reference import (
    by_formula,
    glossary_view,
    gpu_view,
    gpus_view,
    lookup,
    models_view,
    term_view,
    terms,
)
from memfit.report.words import ROLE_WORDS, changes, clock, recipe_facts, visible
from memfit.tables.combinations import refusal
from memfit.tables.optimizers import OPTIMIZERS
from memfit.tables.tasks import usual
from memfit.units import GIB
from plans import CARD, FITS, changed

SMALL, GPU = resolve_model("qwen2.5-0.5b"), find_gpu("rtx-4060")
GLOSSARY = Path(memfit.__file__).parent / "catalogue" / "glossary.toml"
WIDTHS = (60, 80, 100, 120, 200)


def printed(view: RenderableType, width: int = 80, terminal: bool = True, colour: bool = False) -> str:
    """What a terminal of that width shows, without colour unless asked for."""
    file = io.StringIO()
    system: Any = "truecolor" if colour else None
    Console(
        file=file,
        width=width,
        force_terminal=terminal,
        color_system=system,
        highlight=False,
        markup=False,
        legacy_windows=False,
    ).print(view, crop=False)
    return file.getvalue()


def footprint(sizes: dict[str, int]) -> Footprint:
    """One phase with a line per role; reserved is everything but the context."""
    lines = tuple(Line(role, role, size) for role, size in sizes.items())  # type: ignore[arg-type]
    total = sum(sizes.values())
    reserved = total - sizes.get("context", 0)
    return Footprint((PhasePeak("step", "loss", Levels(reserved, reserved, reserved, total), lines),), "formula")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Job(architecture=SMALL, gpu=GPU))


@pytest.fixture(scope="module")
def views(plan: Plan) -> dict[str, RenderableType]:
    found = estimate(SMALL, plan.recipe, GPU)
    data = DatasetFacts(
        path="train.jsonl", lengths=Lengths.of([10, 20, 700, 3000]), layouts=[("messages", 4)], tokenizer="bytes",
        longest=[(3000, 4)], broken=[(5, "not JSON")], broken_count=1, complete=False, notes=["a note"],
    )  # fmt: skip
    known = terms(tomllib.loads(GLOSSARY.read_text()))
    rows = good_for([GPU], entries(), lambda e: architecture(config(e), e.id))
    return {
        "plan": plan_view(plan, ["memfit plan x"]),
        "estimate": estimate_view(SMALL, plan.recipe, GPU, found, judge(found, GPU), ["memfit plan x"]),
        "why": why_view(explain(Account(SMALL, plan.recipe, GPU), found.peak)),
        "techniques": techniques_view(plan, techniques(plan.job)),
        "sweep": heat_map_view(
            sweep(
                SMALL,
                Recipe(),
                GPU,
                (Axis("micro_batch", (1, 2, 4, 8, 64, 999)), Axis("shard", ("none", "parameters"))),
                lambda values: (Recipe(**values), GPU),
            )
        ),
        "data": dataset_view(data, 4),
        "gpus": gpus_view(rows, "a setting", "2026-11-21"),
        "gpu": gpu_view(rows[0], "a setting", "2026-11-21"),
        "models": models_view(entries()[:5]),
        "glossary": glossary_view(known),
        "term": term_view(known[0]),
    }


VIEWS = ("plan", "estimate", "why", "techniques", "sweep", "data", "gpus", "gpu", "models", "glossary", "term")


@pytest.mark.parametrize(("name", "width"), list(product(VIEWS, WIDTHS)))
def test_every_view_fits_its_terminal(views: dict[str, RenderableType], name: str, width: int) -> None:
    lines = printed(views[name], width).splitlines()
    assert lines
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("name", VIEWS)
def test_a_pipe_gets_plain_lines(views: dict[str, RenderableType], name: str) -> None:
    text = printed(views[name], 10_000, terminal=False)
    assert "\x1b" not in text
    assert not set("│╎█■─┃┏└") & set(text)


@pytest.mark.parametrize("name", VIEWS)
def test_colour_adds_nothing_that_plain_text_does_not_say(views: dict[str, RenderableType], name: str) -> None:
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", printed(views[name], colour=True))
    assert coloured == printed(views[name])


# ---- the bar ---------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 10**15), min_size=1, max_size=9)


@given(SIZES, st.integers(0, 300))
def test_cells_share_the_width_in_proportion(sizes: list[int], width: int) -> None:
    found = cells(sizes, width)
    assert sum(found) == (width if sum(sizes) else 0)
    for size, columns in zip(sizes, found, strict=True):
        assert not sum(sizes) or abs(columns - size * width / sum(sizes)) < 1


@given(st.lists(st.integers(1, 200 * GIB), min_size=1, max_size=8), st.integers(1, 300 * GIB), st.integers(20, 200))
def test_the_bar_keeps_its_line_and_its_width(sizes: list[int], usable: int, width: int) -> None:
    parts = tuple(BarPart(word, size) for word, size in zip(ROLE_WORDS.values(), sizes, strict=False))
    lines = printed(StackedBar(parts, usable), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "╎" in lines[0]
    if sum(sizes) > usable:
        assert lines[1].lstrip().startswith("╎")
    else:
        assert float(lines[0].split("╎")[1].removesuffix("GiB")) == pytest.approx(usable / GIB, abs=0.051)


def test_the_line_stands_where_the_card_ends() -> None:
    word = ROLE_WORDS["parameters"]
    inside = printed(StackedBar((BarPart(word, 10 * GIB),), 20 * GIB), 80).splitlines()[0]
    assert 0.45 < inside.rindex("│") / inside.index("╎") < 0.55
    over = printed(StackedBar((BarPart(word, 20 * GIB),), 10 * GIB), 80).splitlines()
    assert over[0].index("╎") == over[1].index("╎")
    assert 0.45 < over[0].index("╎") / over[0].rindex("│") < 0.55


def test_a_terminal_without_unicode_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=80, force_terminal=True, color_system=None).print(
        StackedBar((BarPart(ROLE_WORDS["activations"], GIB),), 2 * GIB)
    )
    assert file.encoding == "ascii"  # and nothing raised
    file.flush()
    assert b"#" in file.buffer.getvalue()  # type: ignore[attr-defined]


def test_shares_leave_out_the_context_and_add_up_to_the_need() -> None:
    found = footprint({"parameters": 5 * GIB, "activations": 2 * GIB, "context": GIB})
    need = 7 * GIB + 100  # 100 bytes of NCCL
    parts = shares(found.peak, Judgement("fits", 20 * GIB, need, 0, 13 * GIB))
    assert sum(p.bytes for p in parts) == need
    assert [p.word.title for p in parts] == ["parameters", "activations", "NCCL buffers"]


# ---- verdict and ladder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "words"), [("fits", "FITS"), ("tight", "TOO TIGHT"), ("misfit", "DOES NOT FIT")])
def test_the_verdict_comes_first(plan: Plan, verdict: Any, words: str) -> None:
    shown = printed(plan_view(replace(plan, judgement=replace(plan.judgement, verdict=verdict))))
    assert shown.splitlines()[3].startswith(words)
    assert ("closest:" in shown) == (verdict == "misfit")


def rung(key: str, recipe: Recipe, caveat: str = "") -> Rung:
    return Rung(key, f"+ {key}", recipe, footprint({"parameters": GIB}), FITS, GIB, 1.0, caveat)


def ladder_plan(recipe: Recipe, *rungs: Rung) -> Plan:
    return Plan(Job(architecture=SMALL, gpu=CARD), recipe, footprint({"parameters": GIB}), FITS, rungs)


def test_the_arrow_stands_at_the_chosen_rung() -> None:
    first, second = rung("plain", Recipe()), rung("checkpointing", Recipe(checkpointing="full"))
    shown = printed(plan_view(ladder_plan(second.recipe, first, second)))
    assert next(line for line in shown.splitlines() if line.startswith("▶")).split()[1:3] == ["+", "checkpointing"]
    assert shown.count("▶") == 1


def test_a_plan_without_a_ladder_is_still_shown() -> None:
    plan = ladder_plan(Recipe())
    assert "FITS" in printed(plan_view(plan))


def test_costs_are_the_caveats_of_the_rungs() -> None:
    full = rung("8-bit", Recipe(optimizer="adamw-8bit"), "rounds states")
    half = rung("16-bit", Recipe(optimizer="adamw-8bit", precision="fp32"), "none: exact")
    assert costs([rung("plain", Recipe()), full, half]) == ("8-bit: rounds states",)
    assert costs([]) == ()


OTHER: dict[type, Any] = {bool: True, int: 7, float: 0.5, tuple: ("q_proj",), str: "other"}


@pytest.mark.parametrize("field", RECIPE_FIELDS)
def test_a_changed_field_is_named(field: str) -> None:
    value = {"method": "qlora", "optimizer": "sgd", "adapter": "dora"}.get(field, OTHER[type(getattr(Recipe(), field))])
    (told,) = changes(Recipe(), Recipe().but(**{field: value}))
    assert told
    assert changes(Recipe(), Recipe()) == ()


def test_recipe_facts_name_what_moves_memory() -> None:
    text = " ".join(
        recipe_facts(changed("quantization", "nf4").but(offload="optimizer", shard="gradients", num_gpus=2))
    )
    for word in ("QLoRA", "nf4", "offload optimizer", "shard gradients", "2 GPUs"):
        assert word in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.351, "0.35 s"), (3.31, "3.3 s"), (18.8, "19 s"), (462, "7.7 min"), (10_800, "3.0 h")]
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_names_cannot_steer_the_terminal() -> None:
    assert visible("evil\x1b[2J\nname") == "evil\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}name"
    model = replace(SMALL, name="[bold]\x1b]0;x\x07")
    shown = printed(plan_view(replace(ladder_plan(Recipe()), job=Job(architecture=model, gpu=CARD))))
    assert "\x1b" not in shown
    assert "[bold]" in shown


# ---- why -------------------------------------------------------------------------------------------------------------

GRID = [
    Recipe(method=method, precision=precision, quantization="nf4-double" if method == "qlora" else "none",
           checkpointing=ck, optimizer=opt, accumulation=accumulation, micro_batch=2, sequence_length=256,
           offload=offload, shard=shard, num_gpus=4 if shard != "none" else 1, trainer=trainer, loss=loss)
    for (method, precision), ck, opt, (accumulation, offload, shard), (trainer, loss) in product(
        (("full", "bf16"), ("full", "bf16-master"), ("lora", "bf16"), ("qlora", "bf16")),
        ("none", "full"),
        ("adamw", "adamw-8bit", "adafactor", "paged-adamw-8bit", "galore"),
        ((1, "none", "none"), (4, "none", "none"), (1, "none", "gradients"), (2, "none", "parameters"),
         (1, "optimizer", "none")),
        (("trl", "fused"), ("torch", "full")),
    )
]  # fmt: skip
POSSIBLE = [r for r in GRID if refusal(r, SMALL, GPU) is None]


@pytest.mark.parametrize("recipe", POSSIBLE[::3], ids=lambda r: "-".join(changes(Recipe(), r)).replace(" ", "_")[:90])
def test_reasons_add_up_to_the_byte(recipe: Recipe) -> None:
    account = Account(SMALL, recipe, GPU)
    for peak in estimate(SMALL, recipe, GPU, replay=False).phases:
        why = explain(account, peak)
        assert sum(r.bytes for r in why.reasons) == peak.levels.device
        for reason in why.reasons:
            assert sum(t.bytes for t in reason.terms) == reason.bytes > 0
            assert reason.words, f"{reason.label} is not explained"
        assert all(kept.total > 0 and kept.role == "activations" for kept in why.kept)


def test_why_writes_the_arithmetic_a_learner_can_redo() -> None:
    llama = resolve_model("llama-2-7b")
    recipe = Recipe(trainer="torch", checkpointing="full", sequence_length=256)
    found = explain(
        Account(llama, recipe, find_gpu("h100")), estimate(llama, recipe, find_gpu("h100"), replay=False).peak
    )
    states = next(r for r in found.reasons if r.role == "optimizer_states")
    assert (
        "AdamW (fused) keeps 2 numbers per trained weight, each as wide as the weight it updates (2 B)" in states.words
    )
    assert "6,738,415,616 x 2 x 2 B = 25.1 GiB" in arithmetic(states)
    for reason in found.reasons:  # the printed products are the bytes
        for term in reason.terms:
            if numbers := re.fullmatch(r"([\d,]+(?: x [\d,]+)*) B", term.text):
                value = 1
                for number in numbers[1].split(" x "):
                    value *= int(number.replace(",", ""))
                assert value == term.bytes


def test_activations_are_bytes_per_token_times_tokens_times_blocks() -> None:
    llama = resolve_model("llama-2-7b")
    recipe = Recipe(trainer="torch", sequence_length=256, micro_batch=2)
    account = Account(llama, recipe, find_gpu("h100"))
    kept = explain(account, estimate(llama, recipe, find_gpu("h100"), replay=False).peak).kept
    gate = next(k for k in kept if k.label.endswith("gate_proj.output"))
    assert gate == replace(gate, bytes=2 * 11008 * 512, count=32, where="block", per_token=True)
    twice = explain(Account(llama, recipe.but(micro_batch=4), find_gpu("h100")),
                    estimate(llama, recipe.but(micro_batch=4), find_gpu("h100"), replay=False).peak).kept  # fmt: skip
    per_token = {(k.where, k.label, k.count): k.bytes for k in kept if k.per_token and k.bytes % 128 == 0}
    for k in twice:
        if (k.where, k.label, k.count) in per_token:
            assert k.bytes == 2 * per_token[k.where, k.label, k.count]


# ---- good for --------------------------------------------------------------------------------------------------------


def test_good_for_is_the_largest_that_fits_and_nothing_larger_does() -> None:
    card = find_gpu("rtx-3090")
    known = {e.stem: e for e in entries()}
    (row,) = good_for([card], entries(), lambda e: architecture(config(e), e.id))
    assert set(row.good_for) == set(RECIPES)
    families = ("llama", "qwen3", "mistral", "gemma3_text")
    for method, best in row.good_for.items():
        recipe = recipe_for(method, card)
        model = architecture(config(known[best.model]), best.model)
        assert judge(estimate(model, recipe, card, replay=False), card).verdict == "fits"
        larger = [
            e for e in entries()
            if e.family in families and e.id.startswith(("meta-llama/", "Qwen/", "mistralai/", "google/"))
            and best.parameters < (e.parameters or 0) < 1.6 * best.parameters
        ]  # fmt: skip
        for entry in larger:
            bigger = architecture(config(entry), entry.id)
            assert judge(estimate(bigger, recipe, card, replay=False), card).verdict != "fits", (method, entry.stem)


def test_cards_that_are_not_modelled_are_good_for_nothing_we_could_promise() -> None:
    (row,) = good_for([find_gpu("m4-max-128gb")], entries(), lambda e: architecture(config(e), e.id))
    assert row.gpu.vendor not in VENDORS
    assert row.good_for == {}


@pytest.mark.parametrize("card", ["m4-max-128gb", "gaudi2", "arc-b60"])
def test_a_card_without_a_link_or_a_model_says_so(card: str) -> None:
    (row,) = good_for([find_gpu(card)], entries(), lambda e: architecture(config(e), e.id))
    shown = printed(gpu_view(row, "a setting", "2026-11-21"), 200)
    assert "link 0" not in shown
    assert "0 SMs" not in shown
    assert "not modelled" in shown
    assert "no catalogued model" not in shown


def test_the_index_knows_which_models_are_refused() -> None:
    for entry in entries():
        try:
            model = architecture(config(entry), entry.id)
            kernel: Any = "sdpa" if all(x.attention.sdpa for x in model.kinds) else "eager"
            closed_form(Account(model, Recipe(sequence_length=128, attention=kernel), find_gpu("h100")))
            refused = False
        except Unsupported:
            refused = True
        assert bool(entry.refused) == refused, entry.stem


def test_the_list_of_models_says_what_a_plan_of_their_usual_task_says() -> None:
    for entry in entries():
        try:
            model = architecture(config(entry), entry.id)
            expected = formula_counts(usual(model), model, Recipe(), "auto")
        except Unsupported:
            expected = False
        if entry.refused and entry.architecture.endswith("ForCausalLM"):
            expected = False  # refused when it is estimated
        assert by_formula(entry) == expected, entry.stem


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_names_that_are_typed_are_never_broken(width: int) -> None:
    lists = (models_view(entries()), gpus_view([GpuRow(g, {}) for g in list_gpus()], "a setting", "2026-11-21"))
    for view, names in zip(lists, ([e.stem for e in entries()], [g.short for g in list_gpus()]), strict=True):
        firsts = {line.split(" ")[0] for line in printed(view, width).splitlines() if line}
        assert set(names) <= firsts


# ---- glossary --------------------------------------------------------------------------------------------------------

KNOWN = terms(tomllib.loads(GLOSSARY.read_text()))
CHOICES = [c for kind in (Method, Precision, Quantization, Checkpointing, Loss, Offload, Shard) for c in get_args(kind)]
COMMON = (
    "none",
    "optimizer",
    "full",
    "selective",
    "parameters",
    "gradients",
    "offload",
    "int8",
)  # explained under their flag


OTHER_WORDS = (
    "requested", "allocated", "reserved", "device", "headroom", "band", "ladder", "rung", "usable", "verdict",
    "trainer", "roofline", "NCCL", "optimizer",
)  # fmt: skip


@pytest.mark.parametrize("word", [*ROLES, *PHASES, *(c for c in CHOICES if c not in COMMON), *OTHER_WORDS])
def test_every_word_memfit_prints_is_explained(word: str) -> None:
    assert lookup(KNOWN, word).means.endswith(".")


def test_glossary_names_are_unique_and_references_lead_somewhere() -> None:
    names = [name.lower() for term in KNOWN for name in {term.name, *term.also}]
    assert len(names) == len(set(names))
    for term in KNOWN:
        for other in term.see:
            assert lookup(KNOWN, other).name == other
            assert other != term.name


def test_the_glossary_lists_every_optimizer() -> None:
    more = lookup(KNOWN, "optimizer").more
    # rows that published runs add for themselves have no name elsewhere
    own = [key for key, row in OPTIMIZERS.items() if row.loop or row.hf_name or row.aliases]
    assert [key for key in own if not re.search(rf"(?<![\w-]){key}(?![\w-])", more)] == []


@pytest.mark.parametrize(
    "word",
    [
        "Gradient Checkpointing",
        "gradient_checkpointing",
        "optimizer-states",
        "  zero ",
        "ZeRO-3",
        "VRAM",
        "optimizer state",
    ],
)
def test_words_are_found_however_they_are_written(word: str) -> None:
    assert lookup(KNOWN, word).name


def test_an_unknown_word_is_refused_with_what_is_near() -> None:
    with pytest.raises(UnknownName) as caught:
        lookup(KNOWN, "fragmentatoin")
    assert "fragmentation" in caught.value.hint


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_the_legend_never_parts_a_name_from_its_number(width: int) -> None:
    parts = tuple(BarPart(word, (i + 1) * GIB) for i, word in enumerate(ROLE_WORDS.values()))
    lines = printed(StackedBar(parts, 99 * GIB), width).rstrip().splitlines()[1:]
    assert all(line.startswith("■") for line in lines)
    for part in parts:
        assert any(f"■ {part.word.title} {part.bytes / GIB:.1f}" in line for line in lines)
