"""memfit trace: recipes run by their own trainers on a virtual card, and held against the closed form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from memfit import Recipe, cli, find_gpu
from memfit.allocator.capacity import capacity
from memfit.allocator.replay import replay
from memfit.documents import codec
from memfit.errors import BadInput
from memfit.footprints.footprint_of_trace import footprint_of, general, judged
from memfit.models.hub import resolve_config
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.nouns.tape import Alloc, Free, Mark, Tape
from memfit.virtual.tracing import trace_recipe
from traced import both

pytestmark = pytest.mark.filterwarnings("ignore")
A100 = find_gpu("a100-80gb")
BAND = {"requested": 0.02, "reserved": 0.10}  # how far the closed form may be from the trace
FULL = Recipe(trainer="transformers", sequence_length=512)
LORA = Recipe(method="lora", loss="fused", sequence_length=1024, checkpointing="full")
QLORA = Recipe(method="qlora", quantization="nf4-double", loss="fused", sequence_length=2048, checkpointing="full")
FUSED = Recipe(loss="fused", sequence_length=1024)
RECIPES = (
    FUSED,
    FUSED.but(checkpointing="full", micro_batch=2, accumulation=4),
    FUSED.but(sequence_length=512, precision="bf16-mixed", optimizer="adamw-foreach"),
    FULL.but(micro_batch=2),
    FULL.but(sequence_length=1024, precision="bf16-mixed", checkpointing="full"),
    FULL.but(trainer="torch", optimizer="adamw-8bit"),
    FULL.but(trainer="torch", precision="fp32", optimizer="sgd-momentum"),
    LORA,
    FULL.but(method="lora", lora_rank=64, lora_dropout=0.05),
    QLORA,
    FULL.but(method="qlora", quantization="nf4", sequence_length=1024, micro_batch=2, checkpointing="full"),
)
MODELS = ("gpt2", "pythia-410m", "qwen3-0.6b", "qwen2.5-0.5b", "gemma-3-1b", "llama-3.2-1b", "opt-1.3b")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.trainer}-{r.method}-{r.precision}-{r.optimizer}")
def test_the_closed_form_is_the_trace_for_every_kind_of_recipe(recipe: Recipe) -> None:
    found = both("smollm2-135m", recipe, A100)
    for level, band in BAND.items():
        assert abs(found.off(level)) <= band, level


@pytest.mark.parametrize("model", MODELS)
def test_the_closed_form_is_the_trace_for_every_kind_of_model(model: str) -> None:
    found = both(model, FULL.but(micro_batch=2), A100)
    for level, band in BAND.items():
        assert abs(found.off(level)) <= band, level


PACKED = Recipe(
    trainer="trl", loss="fused", sequence_length=512, micro_batch=4, padding="packing", checkpointing="full"
)
FIVE_LAYERS = {
    "num_hidden_layers": 5, "layer_types": 4 * ["sliding_attention"] + ["full_attention"], "num_kv_shared_layers": 0
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "recipe", "changes"),
    [
        ("qwen3-30b-a3b", LORA, {"num_hidden_layers": 1}),  # adapters of stacked experts and of the router
        ("deepseek-v2-lite", LORA, {"num_hidden_layers": 2}),  # and dense layers of the same names without
        ("apertus-8b-2509", LORA, {"num_hidden_layers": 1}),  # xIELU in fp32
        ("apertus-8b-2509", FULL, {"num_hidden_layers": 1}),
        ("starcoderbase-1b", LORA, {"n_layer": 2}),  # a causal mask in a buffer, a leaf before dropout
        ("gpt-neo-125m", FULL, {}),  # a causal mask in every layer
        ("bloom-560m", LORA, {"n_layer": 2}),  # hidden states in fp32 behind the norm of the embedding
        ("smollm2-135m", PACKED, {"num_hidden_layers": 8}),  # one row, whose mask is as wide as all of them
        ("gemma-4-e2b", FULL, FIVE_LAYERS),  # embeddings for every layer
    ],
    ids=lambda v: getattr(v, "trainer", v) if not isinstance(v, dict) else "",
)  # fmt: skip
def test_what_the_trace_taught_the_closed_form(model: str, recipe: Recipe, changes: dict[str, Any]) -> None:
    assert abs(both(model, recipe, A100, **changes).off("requested")) < 0.01


def test_a_trace_of_lora_goes_through_every_phase_and_its_lines_add_up() -> None:
    recipe = Recipe(method="lora", loss="fused", sequence_length=256, checkpointing="full")
    tape, answered = trace_recipe(recipe, resolve_config("smollm2-135m"), A100)
    footprint = footprint_of(tape, replay(tape.events), (), (), A100.context_bytes)
    assert [p.phase for p in footprint.phases] == ["load", "first_step", "step", "save", "eval", "resume", "merge"]
    for phase in footprint.phases:
        assert sum(line.bytes for line in phase.lines) == phase.levels.device
        assert phase.levels.requested <= phase.levels.allocated <= phase.levels.reserved <= phase.levels.device
    roles = footprint.peak.by_role
    assert roles["parameters"] == pytest.approx(2 * 134_515_008, rel=0.1)
    assert {"optimizer_states", "activations", "workspace"} <= roles.keys()
    assert tape.about["transformers"] and answered["item"] > 0


def test_a_run_that_only_a_retry_saves_is_told_from_one_that_fails() -> None:
    recipe = Recipe(trainer="torch", sequence_length=512, micro_batch=2)
    tape, _ = trace_recipe(recipe, resolve_config("smollm2-135m"), A100)
    answer = capacity(judged(tape), parse_alloc_conf(""))
    assert answer.smallest <= answer.free.peak.reserved
    assert replay(tape.events, capacity=answer.smallest).oom is None
    assert replay(tape.events, capacity=answer.smallest - (2 << 20)).oom is not None
    assert answer.slack.tensors + answer.slack.rounding <= answer.smallest


def test_merging_decides_no_verdict() -> None:
    events = (Mark("step", "forward"), Alloc(0, 1000), Mark("merge", "merging"), Alloc(1, 10**9), Free(1))
    assert judged(Tape(events, "traced")).events == events[:2]


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("base_model.model.model.layers.17.mlp.up_proj.base_layer.weight", "model.layers.*.mlp.up_proj.weight"),
        ("transformer.h.3.attn: mm", "transformer.h.*.attn: mm"),
        ("exp_avg of layers.0.lora_A.default.weight", "exp_avg of layers.*.lora_A.weight"),
        ("conv1d: copy", "conv1d: copy"),
    ],
)
def test_the_same_tensor_of_every_layer_has_one_name(label: str, shown: str) -> None:
    assert general(label) == shown


def test_a_trace_leaves_the_environment_as_it_was() -> None:
    from huggingface_hub import constants

    before, offline = dict(os.environ), constants.HF_HUB_OFFLINE
    trace_recipe(
        Recipe(loss="fused", sequence_length=64, num_gpus=2, shard="parameters"), resolve_config("smollm2-135m"), A100
    )
    assert dict(os.environ) == before and offline == constants.HF_HUB_OFFLINE


def test_a_trainer_that_fails_says_so_in_one_line() -> None:
    with pytest.raises(BadInput, match="the trainer failed"):
        trace_recipe(Recipe(trainer="torch"), {**resolve_config("smollm2-135m"), "hidden_act": "no-such"}, A100)


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["trace", "smollm2-135m", "--gpu", "l4", "--sequence-length", "256", "--trainer", "torch"]
    assert cli.main([*words, "--save-tape", str(tmp_path / "run.tape.gz")]) == 0
    out, _ = capsys.readouterr()
    assert "FITS" in out and "traced" in out and "smallest" in out
    assert cli.main(["replay", str(tmp_path / "run.tape.gz"), "--gpu", "l4", "--json"]) == 0
    replayed = json.loads(capsys.readouterr()[0])
    assert cli.main([*words, "--json"]) == 0
    document = codec.loads(capsys.readouterr()[0])
    assert document.source == "traced"  # type: ignore[attr-defined]
    assert document.peak.reserved == replayed["peak"]["reserved"]  # type: ignore[attr-defined]
    assert cli.main(["trace", "smollm2-135m", "--gpu-memory", "1GiB", "--sequence-length", "512"]) == 3


def test_trl_imported_before_there_was_a_triton_still_takes_the_road_of_a_card() -> None:
    code = (
        "import trl.kernels.chunked_logprob as before; assert not before._TRITON_AVAILABLE\n"
        "from memfit.virtual.virtual_gpu import virtual_gpu\n"
        "with virtual_gpu('l4'):\n"
        "    import trl.kernels.chunked_logprob as after\n"
        "    assert after._TRITON_AVAILABLE and after is not before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_plan_can_be_confirmed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "smollm2-135m", "--gpu", "l4", "--sequence-length", "256", "--effective-batch", "2"]
    assert cli.main([*words, "--trace", "--json"]) == 0
    out, err = capsys.readouterr()
    document = codec.loads(out)
    assert document.source == "traced" and "traced:" in err  # type: ignore[attr-defined]
    assert cli.main([*words, "--json"]) == 0
    plain = codec.loads(capsys.readouterr()[0])
    assert plain.source == "formula" and plain.recipe == document.recipe  # type: ignore[attr-defined]
    assert document.peak.requested == pytest.approx(plain.peak.requested, rel=0.02)  # type: ignore[attr-defined]


SCRIPTS = Path(__file__).parent / "data" / "scripts"


def test_a_script_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["trace", str(SCRIPTS / "plain_loop.py"), "--gpu", "l4"]
    assert cli.main([*words, "--save-tape", str(tmp_path / "run.tape.gz")]) == 0
    out, err = capsys.readouterr()
    assert "FITS" in out and "traced on a virtual card" in out
    assert "epoch 0" in err and "epoch 0" not in out  # data on stdout, the script's own words beside it
    assert cli.main([*words, "--json", "--steps", "1"]) == 0
    document = codec.loads(capsys.readouterr()[0])
    assert document.source == "traced" and document.about["script"] == "plain_loop.py"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such.py", "--gpu", "l4"], "no-such.py"),
        ([str(SCRIPTS / "plain_loop.py")], "no card named"),
        ([str(SCRIPTS / "plain_loop.py"), "--gpu", "l4", "--method", "lora"], "--method without effect"),
        ([str(SCRIPTS / "plain_loop.py"), "--gpu", "l4", "--steps", "0"], "--steps must be at least 1"),
        ([str(SCRIPTS / "plain_loop.py"), "--gpu", "l4", "--answer", "weather=fine"], "weather"),
        (["smollm2-135m", "gpt2", "--gpu", "l4"], "one model at a time"),
        (["smollm2-135m", "--gpu", "l4", "--steps", "3"], "--steps is for scripts"),
    ],
)
def test_a_wrong_trace_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert cli.main(["trace", *words]) == 2
    _, err = capsys.readouterr()
    assert said in err and "hint:" in err and "Traceback" not in err
