"""Tasks other than language modelling: planned by traces, which are held against runs measured on an H100."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import Ran
from memfit import Recipe, catalogue, cli, estimate, find_gpu
from memfit.catalogue.cards import list_gpus
from memfit.documents import traced_answers
from memfit.errors import BadInput
from memfit.models.families import architecture, trained_for, without_formula
from memfit.models.hub import resolve_config
from memfit.nouns.footprint import Footprint, Levels, Line, PhasePeak
from memfit.nouns.job import Job
from memfit.nouns.plan import Judgement, judge
from memfit.nouns.tape import Alloc, Mark, Tape
from memfit.nouns.task import Shape
from memfit.planner import plan_by_trace, starting_recipe, techniques, traced
from memfit.planner.hardware import cheaper_by_trace
from memfit.planner.search import classes, splits
from memfit.planner.traced import TracedEstimator, Work
from memfit.tables.adapters import ADAPTERS
from memfit.tables.tasks import TASKS, usual

GIB = 1 << 30


# --- the search, over a machine that is a formula ---


class Machine:
    """Measures by a line: bytes that stay, and bytes for each sample, more of them without checkpointing."""

    def __init__(self, job: Job, still: int, each: int) -> None:
        self.job, self.still, self.each, self.asked = job, still, each, 0

    def need(self, recipe: Recipe) -> int:
        share = {"fp32": 1.0, "bf16-mixed": 0.9, "bf16": 0.5}[recipe.precision]
        learned = {"full": 1.0, "lora": 0.3, "qlora": 0.1}[recipe.method]
        states = 0.7 if "8bit" in recipe.optimizer else 1.0
        kept = 1.0 if recipe.checkpointing == "none" else 0.2
        return int(self.still * share * learned * states + self.each * share * kept * recipe.micro_batch)

    def begin(self, recipe: Recipe) -> Callable[[], tuple[Footprint, Judgement]]:
        return lambda: self(recipe)

    def __call__(self, recipe: Recipe) -> tuple[Footprint, Judgement]:
        self.asked += 1
        need = self.need(recipe)
        still = need - int(self.each * 0.2 * recipe.micro_batch)
        levels = Levels(need, need, need, need + self.job.gpu.context_bytes)
        lines = (Line("parameters", "weights", still), Line("activations", "activations", need - still))
        footprint = Footprint((PhasePeak("step", "forward", levels, lines),), "traced")
        return footprint, judge(footprint, self.job.gpu, self.job.reserve)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60 * GIB), st.integers(1, 8 * GIB), st.sampled_from((1, 6, 16, 64)), st.booleans())
def test_the_search_by_trace_finds_the_highest_class_and_its_largest_batch(
    still: int, each: int, batch: int, plenty: bool
) -> None:
    """plenty: the fastest recipe of a class is tried first."""
    model = architecture(resolve_config("bert-base-uncased"), "bert-base-uncased")
    job = Job(architecture=model, gpu=find_gpu("rtx-4090"), effective_batch=batch, sequence_length=512,
              trainer="transformers", task="classification")  # fmt: skip
    machine = Machine(job, still, each)
    estimator = TracedEstimator(job, machine.begin, Work(1e10, 500, weights=2))
    with patch.object(traced, "PLENTY", 1 if plenty else 1 << 60):
        plan = plan_by_trace(job, Recipe(trainer="transformers"), estimator)
    start = starting_recipe(job, Recipe(trainer="transformers"))
    every = [
        [kind.but(checkpointing=c, micro_batch=b, accumulation=batch // b) for c in ("none", "full")
         for b in splits(batch)]
        for kind in classes(job, start) if kind.offload == "none"
    ]  # fmt: skip
    first = next((found for found in every if any(machine(r)[1].verdict == "fits" for r in found)), None)
    if first is None:
        assert plan.judgement.verdict != "fits"
        return
    assert plan.judgement.verdict == "fits"
    assert (plan.recipe.method, plan.recipe.precision) in {(r.method, r.precision) for r in first}
    fitting = [r.micro_batch for r in first
               if r.checkpointing == plan.recipe.checkpointing and r.optimizer == plan.recipe.optimizer
               and machine(r)[1].verdict == "fits"]  # fmt: skip
    assert plan.recipe.micro_batch == max(fitting)
    assert all(rung.footprint.source == "traced" for rung in plan.ladder)


@pytest.mark.parametrize("cards", [1, 8])
def test_where_memory_is_plenty_the_fastest_recipe_alone_is_searched(cards: int) -> None:
    model = architecture(resolve_config("bert-base-uncased"), "bert-base-uncased")
    job = Job(architecture=model, gpu=find_gpu("h100"), effective_batch=16, sequence_length=512, num_gpus=cards,
              trainer="transformers", task="classification")  # fmt: skip
    machine, begun = Machine(job, GIB, GIB // 64), list[Recipe]()

    def begin(recipe: Recipe) -> Callable[[], tuple[Footprint, Judgement]]:
        begun.append(recipe)
        return machine.begin(recipe)

    plan = plan_by_trace(job, Recipe(trainer="transformers"), TracedEstimator(job, begin, Work(1e10, 500)))
    assert plan.judgement.verdict == "fits" and plan.recipe.micro_batch == 16 // cards
    assert {(r.checkpointing, r.shard) for r in begun} == {("none", plan.recipe.shard)}


@pytest.mark.parametrize("idle", [True, False])
def test_a_core_without_work_measures_a_rung_of_the_ladder(idle: bool) -> None:
    """Only one that is idle does: what the search asks for goes first."""
    model = architecture(resolve_config("bert-base-uncased"), "bert-base-uncased")
    job = Job(architecture=model, gpu=find_gpu("rtx-4090"), effective_batch=16, sequence_length=512,
              trainer="transformers", task="classification")  # fmt: skip
    machine, begun, asked = Machine(job, 14 * GIB, 12 * GIB), list[Recipe](), list[Recipe]()

    def begin(recipe: Recipe) -> Callable[[], tuple[Footprint, Judgement]]:
        begun.append(recipe)

        def answer() -> tuple[Footprint, Judgement]:
            if len(asked) == 1:  # the second that is waited for
                assert (rung in begun) == idle
            asked.append(recipe)
            return machine(recipe)

        return answer

    start = starting_recipe(job, Recipe(trainer="transformers"))
    rung = start.but(precision="bf16-mixed", checkpointing="full")
    estimator = TracedEstimator(job, begin, Work(1e10, 500, weights=1 << 32), busy=lambda: 0 if idle else 2)
    plan = plan_by_trace(job, start, estimator)
    assert plan.recipe.checkpointing == "full" and len(asked) > 2 and begun.count(rung) == 1


def test_cheaper_cards_run_what_was_traced() -> None:
    model, own = architecture(resolve_config("bert-base-uncased"), "bert-base-uncased"), find_gpu("h100")
    job = Job(architecture=model, gpu=own, effective_batch=32, sequence_length=512, trainer="transformers",
              task="classification")  # fmt: skip
    machine = Machine(job, 10 * GIB, GIB)
    estimator = TracedEstimator(job, machine.begin, Work(1e10, 500))
    plan = plan_by_trace(job, Recipe(trainer="transformers"), estimator)
    asked = machine.asked
    found, _ = cheaper_by_trace(plan, list_gpus(), estimator)
    assert found and machine.asked == asked  # nothing is traced again
    cards = {gpu.name: gpu for gpu in list_gpus()}
    for option in found:
        card = cards[option.gpu]
        assert (card.price_per_hour or 99) < (own.price_per_hour or 0) and card.bf16
        assert option.judgement.need == machine.need(option.recipe) < card.usable_bytes()
        assert (option.recipe.method, option.recipe.precision) == (plan.recipe.method, plan.recipe.precision)
        assert option.recipe.effective_batch == 32


def test_a_technique_that_the_trainer_refuses_is_not_in_those_after_it() -> None:
    """As diffusers' loop refuses a fused loss, which the ladder tries before checkpointing."""
    model = architecture(resolve_config("bert-base-uncased"), "bert-base-uncased")
    job = Job(architecture=model, gpu=find_gpu("h100"), effective_batch=8, sequence_length=512, method="lora",
              trainer="transformers", task="classification")  # fmt: skip
    machine = Machine(job, 10 * GIB, GIB)

    def begin(recipe: Recipe) -> Callable[[], tuple[Footprint, Judgement]]:
        def answer() -> tuple[Footprint, Judgement]:
            if recipe.checkpointing == "full":
                raise BadInput("no checkpointing", hint="none")
            return machine(recipe)

        return answer

    rungs = techniques(job, Recipe(trainer="transformers"), TracedEstimator(job, begin, Work(1e10, 500)))
    assert len(rungs) >= 3 and {rung.recipe.checkpointing for rung in rungs} <= {"none", "offload"}
    assert rungs[-1].recipe.micro_batch == 1 and rungs[0].recipe.micro_batch == 8
    assert all(rung.recipe.offload == "none" and rung.footprint.source == "traced" for rung in rungs)


# --- the command ---


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-8b", "--task", "painting"), "sft"),  # names the tasks
        (("bert-base-uncased", "--task", "image-classification"), "masked-lm"),  # names what BERT can do
        (("whisper-tiny", "--task", "kto"), "speech"),
        (("vit-base-patch16-224", "--image-size", "0x9"), "224x224"),
        (("bert-base-uncased", "--image-size", "224"), "image-classification"),
        (("whisper-small", "--audio-seconds", "10"), "leave --audio-seconds out"),
        (("vit-base-patch16-224", "--audio-seconds", "10"), "speech-ctc"),
        (("t5-small", "--target-length", "0"), "128"),
        (("qwen2.5-0.5b", "--task", "dpo", "--trainer", "torch"), "--trainer trl"),
        (("bert-base-uncased", "--task", "dpo"), "masked-lm"),
        (("llama-3.1-8b", "--images", "2"), "qwen2.5-vl-7b"),
        (("llama-3.1-8b", "--resolution", "512x512"), "text-to-image"),
        (("gemma-3-4b", "--images", "-1"), "--images 1"),
        (("gemma-3-4b", "--image-size", "0x0"), "--image-size 224x224"),
        (("gemma-3-4b", "--host-memory", "64GiB"), "--images 0"),
        (("gemma-3-4b", "--sequence-length", "128"), "--sequence-length 768"),
        (("sdxl", "--resolution", "0"), "--resolution 512x512"),
        (("sdxl", "--task", "sft"), "text-to-image"),
        (("llama-3.2-1b", "--adapter", "dorra"), "did you mean dora"),
        (("llama-3.2-1b", "--adapter", "dora", "--method", "full"), "--method lora"),
        (("llama-3.2-1b", "--adapter", "xlora"), "memfit trace"),
        (("llama-3.2-1b", "--adapter", "loha", "--method", "qlora"), "--method lora"),
        (("llama-3.2-1b", "--task", "grpo", "--effective-batch", "12"), "--effective-batch 16"),
        (("llama-3.2-1b", "--task", "grpo", "--sequence-length", "512"), "--completion-length"),
        (("llama-3.2-1b", "--task", "dpo", "--generations", "4"), "grpo"),
        (("llama-3.2-1b", "--task", "pretrain", "--method", "lora"), "--task sft"),
    ],
)
def test_what_a_task_does_not_have_is_refused_with_what_it_has(
    words: tuple[str, ...], said: str, ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    pytest.importorskip("trl")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    code, out, err = ran("plan", *words, "--gpu", "t4")
    assert (code, out) == (2, "")
    assert said in err


def test_every_model_has_a_task_and_every_catalogued_one_without_formula_is_named() -> None:
    for entry in catalogue.entries():
        config = dict(catalogue.config(entry))
        model = without_formula(config, entry.id)
        assert usual(model).key in TASKS
    assert usual(without_formula({"model_type": "wav2vec2"}, "x")).key == "speech-ctc"
    assert usual(without_formula({"model_type": "convnext", "image_size": 224}, "x")).key == "image-classification"


# --- adapters ---

TINY = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1100}  # fmt: skip


def test_every_tuner_of_peft_is_a_row_that_its_configuration_takes() -> None:
    pytest.importorskip("trl")
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    from memfit.virtual.jobs.models import adapter_config
    from memfit.virtual.jobs.recipe import Setup

    assert {row.config for row in ADAPTERS.values()} >= {c.__name__ for c in PEFT_TYPE_TO_CONFIG_MAPPING.values()}
    for key, row in ADAPTERS.items():
        if not row.refused[0]:
            found = adapter_config(
                Setup(config=resolve_config("llama-3.2-1b"), method="lora", adapter=key, rank=row.usual)
            )
            assert type(found).__name__ == row.config


# --- sampled answers ---


@pytest.mark.filterwarnings("ignore")
def test_an_answer_sampled_in_few_steps_takes_what_it_takes_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    from memfit.allocator.replay import replay
    from memfit.virtual.jobs import sampling
    from memfit.virtual.tracing import trace_recipe

    peaks = []
    for tokens in (sampling.SAMPLED, 1 << 10):  # the second is more than there are
        monkeypatch.setattr(sampling, "SAMPLED", tokens)
        shape = Shape(prompt=16, completion=24, generations=2, reference=True)
        recipe = Recipe(method="lora", micro_batch=2, accumulation=3, loss="full")
        tape, _ = trace_recipe(recipe, TINY, find_gpu("h100"), task="grpo", shape=shape, brief=True)
        spans = [s for s in replay(tape.events).spans if s.phase == "step"]
        peaks.append({s.instant: max(t.peak.requested for t in spans if t.instant == s.instant) for s in spans})
    few, each = peaks
    assert few.keys() == each.keys() >= {"generation", "forward without gradients", "backward"}
    assert few == pytest.approx(each, rel=0.001)


# --- the cache of answers ---


def test_answers_are_kept_until_they_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    model = architecture(resolve_config("bert-base-uncased"), "bert-base-uncased")
    machine = Machine(Job(architecture=model, gpu=find_gpu("t4")), GIB, GIB)
    answer = traced_answers.Answer(*machine(Recipe()))
    names_of = [traced_answers.key(recipe=Recipe(micro_batch=n)) for n in (1, 2, 3)]
    assert len(set(names_of)) == 3
    for name in names_of:
        traced_answers.write(name, answer)
    assert [traced_answers.read(name, traced_answers.Answer) for name in names_of] == [answer] * 3
    tape = Tape((Mark("step", "forward"), Alloc(1, GIB)), "traced")
    for batch in (1, 2):
        traced_answers.write_tape(Recipe(micro_batch=batch), answer.footprint, tape)
    size = traced_answers.held()["bytes"]
    monkeypatch.setattr(traced_answers, "LIMIT", size)
    traced_answers.write(names_of[0], answer)
    assert traced_answers.tape_of(Recipe(micro_batch=2), answer.footprint) == tape
    assert traced_answers.tape_of(Recipe(micro_batch=3), answer.footprint) is None
    monkeypatch.setattr(traced_answers, "LIMIT", size - 1)  # of what is too much, tapes go before answers
    traced_answers.write(names_of[0], answer)
    assert traced_answers.tape_of(Recipe(micro_batch=1), answer.footprint) is None
    assert traced_answers.held()["answers"] == 3
    (tmp_path / f"{names_of[1]}.json").write_text("{")  # torn by a full disk
    assert traced_answers.read(names_of[1], traced_answers.Answer) is None
    (tmp_path / "mine.json").write_text("{}")
    monkeypatch.setattr(traced_answers, "LIMIT", 1)
    traced_answers.write(names_of[0], answer)
    assert traced_answers.held()["answers"] == 0
    assert (tmp_path / "mine.json").exists()


# --- the traces, against a card ---

RECORDS = Path(__file__).parents[1] / "benchmarks" / "measured" / "h100-tasks-2026-11-26.jsonl"
MIXED = Recipe(trainer="transformers", loss="full", precision="bf16-mixed")
# case of benchmarks/measure/tasks.py -> the same job by name, and what its trace may be off by, of requested bytes
LONG = ("whisper small", "dpo lora", "grpo", "grpo lora")
ATTENTION = Recipe(method="lora", loss="full", lora_targets=("q_proj", "v_proj"))
MINI_LM = {"model_type": "bert", "vocab_size": 1003, "hidden_size": 384, "num_hidden_layers": 6,
           "num_attention_heads": 12, "intermediate_size": 1536, "max_position_embeddings": 512,
           "type_vocab_size": 2}  # fmt: skip
SAMPLED = Shape(padded=False, prompt=64, completion=64)
# answers that are sampled are padded in a trace, and were of one length on the card. With a mask SDPA keeps keys and
# values repeated for all 14 heads, in place of 2
REPEATED = 2 * (14 - 2) * 64 * 2 * 8 * (64 + 64) * 24
JOBS: dict[str, tuple[str | dict[str, Any], str, Recipe, float]] = {
    "bert classification": (
        "bert-base-uncased", "classification", MIXED.but(micro_batch=32, sequence_length=256), 0.01
    ),
    "whisper small": ("whisper-small", "speech", MIXED.but(micro_batch=8), 0.01),
    "vit-b classification": ("vit-base-patch16-224", "image-classification", MIXED.but(micro_batch=64), 0.01),
    "dpo lora": (
        "qwen2.5-0.5b", "dpo",
        ATTENTION.but(micro_batch=4, sequence_length=512), 0.01,
    ),
    "grpo": ("qwen2.5-0.5b", "grpo", Recipe(micro_batch=8, loss="full"), 0.01),
    "grpo lora": ("qwen2.5-0.5b", "grpo", ATTENTION.but(micro_batch=8), 0.01),
    "embedding": (MINI_LM, "embedding", MIXED.but(micro_batch=128, sequence_length=126), 0.01),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_decoder_reads_the_class_off_the_end_of_a_text() -> None:
    pytest.importorskip("trl")
    from memfit.virtual.tracing import trace_recipe

    config = {"model_type": "t5", "vocab_size": 1003, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2,
              "num_heads": 2, "decoder_start_token_id": 0}  # fmt: skip
    tape, _ = trace_recipe(MIXED.but(sequence_length=32, micro_batch=2), config, find_gpu("l4"), task="classification")
    assert len(tape.events) > 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.nightly if name in LONG else ()) for name in JOBS],
)
def test_a_task_takes_what_it_took_on_the_card(case: str) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("torch")
    from memfit.allocator.replay import replay
    from memfit.nouns.alloc_settings import parse_alloc_conf, torch_version
    from memfit.virtual.tracing import trace_recipe

    measured = next(r for line in RECORDS.read_text().splitlines() if (r := json.loads(line))["case"] == case)
    name, task, recipe, most = JOBS[case]
    gpu = replace(find_gpu("h100"), total_bytes=measured["card"]["total_bytes"])
    if task == "embedding":
        pytest.importorskip("sentence_transformers")
    config = resolve_config(name) if isinstance(name, str) else name
    shape = replace(SAMPLED, reference=case == "grpo lora") if task == "grpo" else Shape(padded=False)  # as measured
    tape, _ = trace_recipe(recipe, config, gpu, task=task, shape=shape)
    torch = torch_version(tape.about["torch"])
    found = replay(tape.events, settings=parse_alloc_conf("", torch), torch=torch).by_phase()
    peaks = {
        level: max(getattr(found[p], level) for p in ("first_step", "step")) for level in ("requested", "reserved")
    }
    steps = [s for s in measured["spans"] if s["phase"] in ("first_step", "step")]
    card = {level: max(s[level] for s in steps) for level in peaks}
    card = {level: size + REPEATED * (task == "grpo") for level, size in card.items()}
    assert peaks["requested"] == pytest.approx(card["requested"], rel=most)
    if recipe.precision == "bf16-mixed":  # the others were made on the card in fp32, which left it more cache
        assert peaks["reserved"] == pytest.approx(card["reserved"], rel=2 * most)


def test_pairs_of_texts_take_by_formula_what_they_took_on_the_card() -> None:
    measured = next(r for line in RECORDS.read_text().splitlines() if (r := json.loads(line))["case"] == "embedding")
    config, task, recipe, most = JOBS["embedding"]
    assert isinstance(config, dict)
    found = estimate(trained_for(config, "MiniLM", TASKS[task]), recipe, find_gpu("h100"))
    step = next(p.levels for p in found.phases if p.phase == "step")
    card = [span for span in measured["spans"] if span["phase"] == "step"]
    for level in ("requested", "reserved"):
        assert getattr(step, level) == pytest.approx(max(span[level] for span in card), rel=most)


def test_a_plan_by_trace_is_answered_twice_alike(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    words = ("plan", "vit-base-patch16-224", "--gpu", "t4", "--effective-batch", "2", "--attention", "eager", "--json")
    code, first, err = ran(*words)
    assert code == 0, err
    document = json.loads(first)
    assert (document["job"]["task"], document["source"]) == ("image-classification", "traced")
    assert document["ladder"][-1]["recipe"] == document["chosen"]["recipe"]
    assert 4 * 85_000_000 < document["by_role"]["parameters"] < 4 * 90_000_000  # ViT-B/16 has 86 M
    monkeypatch.setattr("memfit.cli.trace.traced", None)  # the second answer traces nothing
    assert ran(*words) == (0, first, err)
    assert ran(*words[:-1], "--html", str(tmp_path / "plan.html"))[0] == 0
    assert '<polygon class="gradients"' in (tmp_path / "plan.html").read_text().split("<h2>Timeline</h2>")[1]


def test_equal_models_are_one_object() -> None:
    """Caches know an architecture by identity: a process that is asked again must not count everything again."""
    config = resolve_config("smollm2-135m")
    row = TASKS["classification"]
    assert architecture(config, "a") is architecture(dict(config), "a") is not architecture(config, "b")
    assert trained_for(config, "a", row) is trained_for(dict(config), "a", row) is not architecture(config, "a")
    assert architecture({**config, "num_hidden_layers": 2}, "a") is not architecture(config, "a")


@pytest.mark.parametrize(
    ("config", "said"),
    [({"model_type": "frobnicator", "auto_map": {"AutoConfig": "mine.Config"}}, "frobnicator"),
     ({"model_type": "mamba", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 1e4}, "'mamba'")],
)  # fmt: skip
def test_a_config_that_transformers_does_not_take_is_bad_input(
    config: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["AnyForCausalLM"], **config}))
    assert cli.main(["plan", str(tmp_path), "--gpu", "rtx-4090"]) == BadInput.exit_code
    shown = capsys.readouterr().err
    assert said in shown and "memfit trace train.py" in shown and "bug" not in shown
