"""The closed form of tasks other than language modelling, against their own trainers on a virtual card."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from conftest import Ran
from memfit import Recipe, estimate, find_gpu
from memfit.allocator.replay import replay
from memfit.closed_form import ops
from memfit.closed_form.run.account import Account
from memfit.closed_form.style import CODES, Code
from memfit.closed_form.task_runs import ENCODERS, SCORED, TASK_RUNS, by_formula
from memfit.errors import BadInput
from memfit.footprints.footprint_of_trace import footprint_of
from memfit.models.families import DIALECTS, architecture, trained_for
from memfit.models.hub import resolve_config
from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.nouns.task import Shape
from memfit.tables import combinations
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import trainer
from smoke import smoke

pytestmark = pytest.mark.filterwarnings("ignore")

CARD = Path(__file__).parents[1] / "benchmarks" / "measured" / "h200-planned-2026-11-26.jsonl"
SEGMENT = 20 << 20  # bytes: what tensors of 1 to 10 MiB come in
LLAMA = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "head_dim": 64,
         "num_attention_heads": 8, "num_key_value_heads": 4,
         "vocab_size": 8000, "tie_word_embeddings": False}  # fmt: skip
BERT: dict[str, Any] = {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 6,
        "intermediate_size": 1536,
        "vocab_size": 8000, "max_position_embeddings": 514, "type_vocab_size": 2}  # fmt: skip
ROBERTA = {**BERT, "model_type": "roberta"}
SPACE = {"image_token_id": 11, "video_token_id": 12, "vision_start_token_id": 13, "vision_end_token_id": 14}
TEXT = {**LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4}}
SEEING = {"depth": 2, "hidden_size": 640, "out_hidden_size": 512, "intermediate_size": 1720, "num_heads": 8}
QWEN2_VL: dict[str, Any] = {"model_type": "qwen2_vl", "text_config": {**TEXT, "model_type": "qwen2_vl_text"}, **SPACE,
            "vision_config": {"depth": 2, "embed_dim": 640, "hidden_size": 512, "num_heads": 8}}  # fmt: skip
WINDOWED = {**QWEN2_VL, "model_type": "qwen2_5_vl", "text_config": {**TEXT, "model_type": "qwen2_5_vl_text"},
            "vision_config": {**SEEING, "fullatt_block_indexes": [1]}}  # fmt: skip
VIT = {"model_type": "vit", "hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 6,
       "intermediate_size": 1536, "image_size": 224, "patch_size": 16}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 384, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 6, "vocab_size": 8000,
      "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # fmt: skip
WHISPER = {"model_type": "whisper", "d_model": 384, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 1536,
           "encoder_attention_heads": 6, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536, "vocab_size": 8000,
           "num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448, "pad_token_id": 0,
           "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}  # fmt: skip
LORA = Recipe(method="lora", trainer="trl", loss="full", micro_batch=2, sequence_length=256)
MIXED = LORA.but(method="full", precision="bf16-mixed", checkpointing="full")
QLORA = LORA.but(method="qlora", quantization="nf4-double", checkpointing="full")
SHAPE = Shape(prompt=128, completion=128, generations=2)
TWO = replace(SHAPE, images=2, image=(500, 330))
SEEN = {"loss": "fused", "sequence_length": 640}
PLAIN = {"trainer": "transformers", "micro_batch": 4}
CASES: tuple[tuple[str, Recipe, dict[str, Any]], ...] = (
    ("dpo", LORA, LLAMA),  # the reference pass is the peak
    ("dpo", MIXED.but(micro_batch=1, accumulation=2), LLAMA),  # beside a second model
    ("dpo", QLORA.but(precision="fp16-mixed", lora_rank=64), LLAMA),  # adapters are widened for the loss scaler
    ("kto", LORA.but(checkpointing="full"), LLAMA),
    ("kto", MIXED.but(checkpointing="none"), LLAMA),
    ("grpo", LORA.but(accumulation=2, lora_dropout=0.05), LLAMA),  # TRL leaves dropout on where answers are sampled
    ("grpo", QLORA.but(accumulation=8), LLAMA),  # the generation is the peak
    ("orpo", LORA, LLAMA),
    ("orpo", MIXED, LLAMA),
    ("reward", LORA, LLAMA),  # the new head is trained beside the adapters
    ("reward", MIXED, LLAMA),
    ("classification", QLORA.but(**PLAIN), LLAMA),
    ("classification", LORA.but(**PLAIN), BERT),
    ("classification", LORA.but(**PLAIN), ROBERTA),  # a head of two layers is trained whole
    ("masked-lm", MIXED.but(**PLAIN, sequence_length=512), BERT),  # logits are widened after the region of autocast
    ("image-text", LORA.but(**SEEN), WINDOWED),  # the graph of the tower is the peak
    ("image-text", QLORA.but(**SEEN), QWEN2_VL),
    ("image-text", MIXED.but(**SEEN, micro_batch=1, accumulation=2, checkpointing="none"), WINDOWED),
    ("image-classification", LORA.but(**PLAIN), VIT),
    ("image-classification", MIXED.but(**PLAIN, checkpointing="none"), VIT),
    ("seq2seq", MIXED.but(**PLAIN, accumulation=2), T5),  # three uses of one table; a bias that is shared and summed
    ("seq2seq", LORA.but(**PLAIN, checkpointing="none"), T5),
    ("seq2seq", QLORA.but(**PLAIN), T5),  # whose last projections stay whole
    ("speech", MIXED.but(**PLAIN, accumulation=2), WHISPER),
    # the convolutions' graph
    ("speech", MIXED.but(trainer="transformers", micro_batch=1, precision="fp32", checkpointing="none"), WHISPER),
    ("speech", LORA.but(**PLAIN, checkpointing="full"), WHISPER),  # the recording needs no gradient
    ("speech", QLORA.but(**PLAIN, attention="eager"), WHISPER),
    ("token-classification", MIXED.but(**PLAIN, checkpointing="none"), BERT),
    ("embedding", MIXED.but(**PLAIN, checkpointing="none", accumulation=2), LLAMA),  # gradients wait beside gradients
    ("embedding", LORA.but(**PLAIN, checkpointing="full"), BERT),
)  # fmt: skip


# what is left of reading and writing answers decides what the training step reserves
SAMPLED: tuple[tuple[str, Recipe, dict[str, Any]], ...] = (
    # each token repeats and scales the keys of the cache, which lies where reading the prompts has left it
    ("grpo", MIXED.but(precision="fp32", micro_batch=8, accumulation=2), {**LLAMA, "num_hidden_layers": 6}),
    # no autocast around the base model, whose 4-bit weights are restored in bf16, and by no pass of four tokens
    ("rloo", QLORA.but(quantization="nf4", precision="bf16-mixed", accumulation=2),
     {**LLAMA, "hidden_size": 1024, "intermediate_size": 8192}),
)  # fmt: skip


def worst(footprint: Footprint) -> PhasePeak:
    """Return the training step that needs most tensors' bytes."""
    steps = (p for p in footprint.phases if p.phase in ("first_step", "step"))
    return max(steps, key=lambda p: p.levels.requested)


@pytest.mark.parametrize(
    ("task", "recipe", "config"),
    (*smoke(CASES, lambda c: [c[0], (c[1].method, c[1].checkpointing), c[1].precision, c[2]["model_type"]]), *SAMPLED),
    ids=lambda v: v if isinstance(v, str) else getattr(v, "method", ""),
)
def test_a_task_takes_by_formula_what_its_trainer_takes(task: str, recipe: Recipe, config: dict[str, Any]) -> None:
    from memfit.virtual.tracing import trace_recipe

    if task == "embedding":
        pytest.importorskip("sentence_transformers")
    gpu = find_gpu("a100-80gb")
    shape = TWO if task == "image-text" else SHAPE
    tape, _ = trace_recipe(recipe, config, gpu, task=task, shape=shape, brief=True)
    traced = footprint_of(tape, replay(tape.events), (), (), gpu.context_bytes)
    gc.collect()
    found = estimate(trained_for(config, "tiny", TASKS[task], shape), recipe, gpu)
    formula, truth = worst(found).levels, worst(traced).levels
    assert -0.01 <= formula.requested / truth.requested - 1 <= 0.02
    assert abs(formula.reserved - truth.reserved) <= 0.05 * truth.reserved + SEGMENT
    if (task, recipe, config) in SAMPLED:
        assert formula.reserved == pytest.approx(truth.reserved, rel=0.01)
    if TASKS[task].evaluated:
        evaluated = [next(p for p in f.phases if p.phase == "eval").levels.requested for f in (found, traced)]
        assert evaluated[0] == pytest.approx(evaluated[1], rel=0.06)


@pytest.mark.parametrize(("task", "config"), [("image-classification", VIT), ("masked-lm", BERT)])
def test_inputs_of_all_micro_batches_are_fetched_at_once(task: str, config: dict[str, Any]) -> None:
    """Two of four run in a trace; the others' inputs lie beside them, as where transformers runs all."""
    from memfit.virtual.jobs.recipe import setup_of
    from memfit.virtual.tracing import _traced

    gpu = find_gpu("a100-80gb")
    few = replace(setup_of(LORA.but(**PLAIN, accumulation=4), config, task), evaluate=False, save=False, merge=False)
    tapes = [_traced(setup, gpu, "")[0] for setup in (few, replace(few, accumulation=4))]
    peaks = [replay(tape.events).peak for tape in tapes]
    assert peaks[0].requested == pytest.approx(peaks[1].requested, abs=1 << 10)
    assert peaks[0].reserved == peaks[1].reserved


PREFERRED = LORA.but(checkpointing="full", sequence_length=1023)
MEASURED: tuple[tuple[str, str, str, Recipe], ...] = (
    # the order of the layer norms' copies decides on 160 MiB
    (
        "whisper-large-v3",
        "whisper-large-v3",
        "speech",
        PREFERRED.but(trainer="transformers", method="full", micro_batch=8),
    ),
    ("t5-xl", "flan-t5-xl", "seq2seq", PREFERRED.but(trainer="transformers", micro_batch=8, sequence_length=512)),
    ("llama dpo", "llama-3.2-1b", "dpo", PREFERRED.but(method="full")),
    ("llama kto", "llama-3.2-1b", "kto", PREFERRED),
    ("llama orpo", "llama-3.2-1b", "orpo", PREFERRED),  # where the norms' fp32 products are freed decides on 128 MiB
    ("llama reward", "llama-3.2-1b", "reward", PREFERRED.but(method="full", sequence_length=1024)),
)


@pytest.mark.parametrize(("case", "name", "task", "recipe"), MEASURED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_task_takes_by_formula_what_it_took_on_a_card(case: str, name: str, task: str, recipe: Recipe) -> None:
    """Runs on an H200 with the trainers' own code.

    Under PyTorch 2.11, which has 1 MiB of cuBLASLt for each of two threads once a layer with a bias has run.
    """
    record = next(r for line in CARD.read_text().splitlines() if (r := json.loads(line))["case"] == f"planned {case}")
    model = trained_for(resolve_config(name), name, TASKS[task])
    found = {p.phase: p.levels for p in estimate(model, recipe, find_gpu("h200"), at_capacity=False).phases}
    phases = {"load", "first_step", "step", "save", "eval"}
    phases -= {"orpo": {"eval"}, "speech": {"load"}}.get(task, set())  # whose loss is in no span; with the first batch
    for phase in phases:
        spans = [s for s in record["spans"] if s["phase"] == phase]
        # in the first step the cuBLAS workspace of the backward's thread may come after the peak
        over = 32 << 20 if phase == "first_step" else 0
        requested, reserved = (max(s[level] for s in spans) for level in ("requested", "reserved"))
        off = found[phase].requested - requested + 2 * (1 << 20) * (task == "speech")
        assert -2e-4 * requested <= off <= 2e-4 * requested + over
        assert found[phase].reserved == pytest.approx(reserved, rel=0.014 if task == "seq2seq" else 0.007)


def test_the_math_kernel_of_an_encoder_and_of_cross_attention_masks_nothing() -> None:
    """bf16 on a T4, which no other kernel takes: a trace of the whole model reserved 1,340 and 1,350 MiB."""
    model = trained_for(resolve_config("whisper-tiny"), "whisper-tiny", TASKS["speech"])
    recipe = LORA.but(trainer="transformers", sequence_length=128)
    found = {p.phase: p.levels.reserved / (1 << 20) for p in estimate(model, recipe, find_gpu("t4")).phases}
    assert (found["first_step"], found["step"]) == (pytest.approx(1340, rel=0.01), pytest.approx(1350, rel=0.01))


def test_the_formula_answers_for_models_whose_class_transformers_has() -> None:
    from transformers.models.auto import modeling_auto

    classes = {task: set(getattr(modeling_auto, TASKS[task].mapping)) for task in TASK_RUNS}
    assert classes["reward"] >= SCORED | ENCODERS
    assert classes["masked-lm"] >= ENCODERS
    assert DIALECTS.keys() >= SCORED | ENCODERS


def test_what_was_not_compared_is_left_to_the_trace() -> None:
    model, dpo = architecture(LLAMA, "tiny"), TASKS["dpo"]
    assert by_formula(dpo, model, LORA)
    for recipe in (LORA.but(num_gpus=2), LORA.but(adapter="vera"), LORA.but(offload="optimizer")):
        assert not by_formula(dpo, model, recipe)
    assert not by_formula(TASKS["orpo"], model, LORA, "auto")  # it may choose QLoRA
    assert not by_formula(TASKS["grpo"], replace(model, model_type="mixtral"), LORA)
    assert not by_formula(dpo, replace(model, model_type="phimoe"), LORA)


def test_adapters_on_a_new_layer_are_refused_as_peft_refuses_them() -> None:
    model = trained_for(BERT, "tiny", TASKS["token-classification"])
    with pytest.raises(BadInput) as refused:
        combinations.check(LORA, model)
    assert "--lora-targets attention" in refused.value.hint
    combinations.check(LORA.but(lora_targets=("attention",)), model)


def test_a_plan_by_formula_traces_nothing(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.cli.trace.traced", None)
    words = ("plan", "qwen2.5-0.5b", "--gpu", "h100", "--task", "dpo", "--method", "full", "--precision", "bf16")
    code, out, err = ran(*words, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["job"]["task"], document["source"]) == ("dpo", "formula")
    assert document["by_role"]["parameters"] == 2 * 2 * 494_032_768  # the model and its reference
    assert document["chosen"]["recipe"]["loss"] == "full"  # the trainer's own


def test_softmax_of_old_pytorch_keeps_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    found = architecture({**BERT, "architectures": ["BertForSequenceClassification"]}, "bert")
    recipe = LORA.but(method="full", precision="fp32", sequence_length=64, attention="eager", trainer="torch")
    gpu, row = find_gpu("a100-80gb"), trainer("torch")
    monkeypatch.setitem(CODES, "old", Code(softmax=partial(ops.softmax, keeps_input=True)))
    kept = [
        sum(account.meter.bytes(step.segment.left) for step in account.micro().until_loss.steps)
        for account in (Account(found, recipe, gpu, profile=replace(row, code=code)) for code in ("old", row.code))
    ]
    scores = 4 * recipe.micro_batch * BERT["num_attention_heads"] * recipe.sequence_length**2
    assert kept[0] - kept[1] == BERT["num_hidden_layers"] * scores
