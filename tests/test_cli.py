"""The command line as a person and a script meet it: output, exit codes, errors, flags and what is never imported."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from memfit import Recipe, __version__
from memfit.catalogue import Entry, entries
from memfit.catalogue.cards import list_gpus
from memfit.cli import flags as flag_table
from memfit.cli import main
from memfit.cli.tree import COMMANDS, app
from memfit.documents.recipe_file import loads
from memfit.nouns.job import Training

MODEL, CARD = "qwen2.5-0.5b", "rtx-4060"
RUN = (MODEL, "--gpu", CARD)
MISFIT = ("qwen2.5-7b", "--gpu", CARD, "--method", "full", "--offload", "none")
Ran = Callable[..., tuple[int, str, str]]
COMMON = ["--json", "--debug", "--help"]
CARDS = ["--gpu", "--gpu-memory", "--reserve"]
RECIPE = ["--method", "--precision", "--quantization", "--adapter", "--lora-rank", "--lora-alpha", "--lora-dropout",
          "--lora-targets", "--modules-to-save", "--optimizer", "--micro-batch", "--accumulation", "--sequence-length",
          "--padding",
          "--checkpointing", "--checkpoint-interval", "--checkpoint-stride", "--keep-gradients",
          "--attention", "--compile", "--loss", "--offload", "--shard", "--loading",
          "--fsdp-version", "--num-gpus", "--context-parallel", "--trainer", "--alloc-conf", "--zero-conf"]  # fmt: skip
OUT = ["--out", "--target", "--force"]
HOST = ["--host-memory", "--workers"]
TASK = ["--task", "--images", "--image-size", "--resolution", "--cache-latents", "--audio-seconds",
        "--target-length", "--prompt-length", "--completion-length", "--generations", "--reference"]  # fmt: skip
FLAGS = {
    "plan": [
        *CARDS,
        *HOST,
        "--any-gpu",
        "--trace",
        "--no-trace",
        *TASK,
        "--effective-batch",
        "--data",
        "--tokenizer",
        "--from",
        "--ignore",
        *OUT,
        "--save-tape",
        "--html",
        *RECIPE,
        *COMMON,
    ],
    "page": [*CARDS, "--task", "--follow", "--port", "--open", *COMMON],
    "estimate": [
        *CARDS,
        *HOST,
        "--from",
        "--ignore",
        "--why",
        "--save-tape",
        "--html",
        "--force",
        *TASK,
        *RECIPE,
        *COMMON,
    ],
    "trace": [
        *CARDS,
        *HOST,
        *TASK,
        "--data",
        "--tokenizer",
        "--from",
        "--ignore",
        "--full",
        "--steps",
        "--answer",
        "--ranks",
        "--gpus-per-node",
        "--save",
        "--save-tape",
        "--snapshot",
        "--html",
        "--force",
        *RECIPE,
        *COMMON,
    ],
    "watch": ["--predicted", "--log", "--every", "--measure", "--to", "--live", "--page", "--html", "--force", *COMMON],
    "mcp": ["--allow-trace", "--debug", "--help"],
    "check": [
        "--base",
        "--format",
        "--report",
        "--file",
        "--jobs",
        "--fresh",
        "--init",
        "--gpu",
        "--force",
        *COMMON,
    ],
    "diff": [
        "--env",
        "--gpu",
        "--reserve",
        "--ignore",
        "--steps",
        "--answer",
        "--alloc-conf",
        "--fresh",
        "--html",
        "--force",
        *COMMON,
    ],
    "compare": ["--gpu", "--device", "--html", "--force", *COMMON],
    "train": [
        *CARDS,
        *TASK,
        "--effective-batch",
        "--data",
        "--tokenizer",
        "--out",
        "--resume",
        "--force",
        "--cpu",
        "--eval-data",
        "--epochs",
        "--learning-rate",
        "--max-steps",
        "--save-steps",
        "--falls",
        "--memory-limit",
        "--merge",
        "--no-rehearsal",
        *RECIPE,
        *COMMON,
    ],
    "techniques": [*CARDS, *HOST, *TASK, "--effective-batch", "--from", "--ignore", "--target", *RECIPE, *COMMON],
    "sweep": [
        *CARDS,
        *HOST,
        "--over",
        "--from",
        "--ignore",
        "--csv",
        "--svg",
        "--force",
        *TASK,
        *RECIPE,
        *COMMON,
    ],
    "replay": [
        *CARDS,
        "--alloc-conf",
        "--torch",
        "--device",
        "--save-tape",
        "--snapshot",
        "--html",
        "--force",
        *COMMON,
    ],
    "explain": ["--model", "--from", *CARDS, "--device", "--html", "--force", *RECIPE, *COMMON],
    "gpus": COMMON,
    "models": COMMON,
    "data": ["--tokenizer", "--task", "--text-field", "--limit", "--micro-batch", *COMMON],
    "glossary": COMMON,
    "export": ["--gpu", "--from", "--ignore", *OUT, *COMMON],
    "launch": [
        "--gpu",
        "--target",
        "--nodes",
        *HOST,
        "--hours",
        "--image",
        "--ignore",
        "--eval-data",
        "--epochs",
        "--learning-rate",
        "--max-steps",
        "--out",
        "--submit",
        "--force",
        *COMMON,
    ],
    "cache": ["--clear", *COMMON],
    "doctor": COMMON,
}


# ---- what is promised to scripts -------------------------------------------------------------------------------------


def test_the_flags_are_frozen() -> None:
    """Scripts are written against these: add, but never rename or drop without a word in the changelog."""
    commands = {name: app.get_command(None, name) for name in COMMANDS}  # type: ignore[arg-type]
    found = {
        name: [o for p in command.params for o in p.opts if o.startswith("--")] for name, command in commands.items()
    }
    assert {name: [*options, "--help"] for name, options in found.items()} == FLAGS


def test_recipe_flags_are_the_fields_of_recipe_with_their_choices() -> None:
    hints = get_type_hints(Recipe)
    for row in flag_table.RECIPE:
        choices = [c for c in get_args(hints[row.name]) if isinstance(c, str)]
        assert row.flag == "--" + row.name.replace("_", "-")
        assert row.help
        if choices:
            assert row.metavar == "|".join(choices)
    assert [row.name for row in flag_table.RECIPE] == [f.name for f in fields(Recipe)]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("estimate", *RUN), 0),
        (("estimate", "qwen2.5-7b", "--gpu", CARD), 3),
        (("plan", *RUN), 0),
        (("plan", *MISFIT), 3),
        (("techniques", *RUN), 0),
        (("glossary",), 0),
    ],
)
def test_exit_codes_say_the_verdict(ran: Ran, arguments: tuple[str, ...], code: int) -> None:
    assert ran(*arguments)[0] == code


@pytest.mark.parametrize("arguments", [("estimate", *RUN, "--why"), ("plan", *RUN), ("techniques", *RUN)])
def test_a_pipe_has_no_two_empty_lines(ran: Ran, arguments: tuple[str, ...]) -> None:
    out = ran(*arguments)[1]
    assert "\n\n" in out and "\n\n\n" not in out


def test_too_tight_to_promise_is_four(ran: Ran) -> None:
    """A card with exactly the memory of the peak has no room for the prediction's error."""
    need = json.loads(ran("estimate", *RUN, "--json")[1])["need"]
    code, out, _ = ran("estimate", MODEL, "--gpu-memory", f"{need + 500 * 2**20 + 2**20}")
    assert (code, "TOO TIGHT" in out) == (4, True)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["phi-3.5-moe", "meta-llama/Llama-4-Scout-17B-16E"])
@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_defaults_that_a_model_does_not_run_with_step_aside_and_say_so(ran: Ran, command: str, model: str) -> None:
    """TRL runs neither of them, and PEFT has no adapter for their routers."""
    method = () if command == "plan" else ("--method", "lora")
    code, out, err = ran(command, model, "--gpu", "h200", *method)
    assert code in (0, 3, 4) and "LoRA" in out
    assert "note: --trainer transformers:" in out + err and "note: --lora-targets attention:" in out + err
    code, _, err = ran(command, model, "--gpu", "h200", *method, "--trainer", "trl")
    assert code == 2 and "hint: take --trainer transformers" in err


def test_next_commands_keep_the_cards(ran: Ran) -> None:
    _, out, _ = ran("estimate", "gpt2", "--gpu", "h200", "--num-gpus", "8")
    assert "memfit plan openai-community/gpt2 --gpu h200 --num-gpus 8" in out


def test_the_largest_values_are_no_less_than_the_plan(ran: Ran) -> None:
    """This holds for sharded runs too, whose closed form is coarser than the replay that chose them."""
    _, out, _ = ran("plan", "Qwen/Qwen3.5-9B", "--images", "0", "--gpu", "2xh100", "--shard", "parameters", "--json")
    plan = json.loads(out)
    recipe = plan["recipe"]
    assert all(plan["largest"][name] >= recipe[name] for name in ("micro_batch", "sequence_length"))


def test_a_plan_from_a_recipe_keeps_its_training(ran: Ran, tmp_path: Path) -> None:
    assert ran("plan", *RUN, "--out", tmp_path / "run")[0] == 0
    path = tmp_path / "run" / "recipe.toml"
    path.write_text(path.read_text() + "\n[training]\nmax_steps = 7\n")
    assert ran("plan", "--from", path, "--gpu", CARD, "--out", tmp_path / "again")[0] == 0
    assert loads((tmp_path / "again" / "recipe.toml").read_text()).training == Training(max_steps=7)


def test_plan_out_writes_files_that_come_back(ran: Ran, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, err = ran("plan", *RUN, "--out", folder, "--target", "trl")
    assert code == 0
    assert "FITS" in out
    assert f"wrote {folder / 'recipe.toml'}" in err
    assert f"next: memfit train {folder / 'recipe.toml'} --data train.jsonl" in out
    written = loads((folder / "recipe.toml").read_text())
    same = json.loads(ran("estimate", "--from", folder / "recipe.toml", "--json")[1])
    assert same["recipe"]["micro_batch"] == written.recipe.micro_batch
    assert same["gpu"]["short"] == CARD
    code, out, err = ran("plan", *RUN, "--out", folder)
    assert (code, out, "already holds recipe.toml" in err, "--force" in err) == (2, "", True, True)
    assert ran("plan", *RUN, "--out", folder, "--force")[0] == 0


@pytest.mark.parametrize("flag", ["--micro-batch", "--nonsense"])
def test_a_misused_flag_leads_to_the_help_of_its_command(ran: Ran, flag: str) -> None:
    code, _, err = ran("estimate", MODEL, flag)
    assert code == 2 and flag in err and "see: memfit estimate --help" in err


@pytest.mark.parametrize(
    ("command", "hint"),
    [("estimate", "--from run/recipe.toml"), ("plan", "--from"), ("techniques", "--from")],
)
def test_a_recipe_in_place_of_a_model_is_told_apart(ran: Ran, command: str, hint: str) -> None:
    code, out, err = ran(command, "run/recipe.toml", "--gpu", CARD)
    assert (code, out) == (2, "") and "settings" in err and err.splitlines()[-1].startswith(f"hint: {hint}")


def test_export_turns_a_recipe_into_other_files(ran: Ran, tmp_path: Path) -> None:
    ran("plan", *RUN, "--method", "lora", "--out", tmp_path / "run")
    hint = ran("export", tmp_path / "run" / "recipe.toml", "--target", "axolotl")[2].splitlines()[-1]
    assert hint.endswith("--target axolotl --out run-axolotl/")
    code, out, err = ran(
        "export", tmp_path / "run" / "recipe.toml", "--target", "axolotl", "--out", tmp_path / "axolotl"
    )
    assert code == 0
    assert str(tmp_path / "axolotl" / "axolotl.yaml") in out.splitlines()
    assert "axolotl" in err
    code, out, _ = ran(
        "export", tmp_path / "run" / "recipe.toml", "--target", "trl", "--out", tmp_path / "again", "--json"
    )
    found = json.loads(out)
    assert (code, found["target"]) == (0, "trl")
    assert all(Path(path).is_file() for path in found["files"])


def test_what_does_not_fit_is_not_written_by_accident(ran: Ran, tmp_path: Path) -> None:
    code, out, err = ran("plan", *MISFIT, "--out", tmp_path / "run")
    assert code == 2
    assert "DOES NOT FIT" in out
    assert "no files were written" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("batch", "steps", "cards"), [(8, 2, 1), (8, 8, 1), (64, 4, 2)])
def test_of_a_batch_and_its_steps_the_micro_batch_follows(ran: Ran, batch: int, steps: int, cards: int) -> None:
    words = [
        "plan",
        "llama-3.2-1b",
        "--gpu",
        f"{cards}xh100",
        "--effective-batch",
        str(batch),
        "--accumulation",
        str(steps),
    ]
    code, out, _ = ran(*words, "--json")
    recipe = json.loads(out)["recipe"]
    assert code == 0 and recipe["micro_batch"] * steps * cards == batch and recipe["accumulation"] == steps
    assert "evenly" not in out


@pytest.mark.parametrize(("model", "length"), [("gpt2", 1024), ("tinyllama-1.1b", 2048), ("qwen2.5-0.5b", 3008)])
def test_no_length_from_the_data_is_beyond_the_positions_of_the_model(
    ran: Ran, tmp_path: Path, model: str, length: int
) -> None:
    """Learned positions end there; rotary ones were never trained further."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * 3000}) + "\n" for _ in range(5)))
    code, out, err = ran("plan", model, "--gpu", "h100", "--data", file, "--tokenizer", "bytes", "--json")
    assert code == 0 and json.loads(out)["recipe"]["sequence_length"] == length
    assert ("the number of positions the model has: 5 of 5 samples (100.0%)" in err) is (length < 3000)


@pytest.mark.parametrize("entry", [e for e in entries() if e.refused], ids=lambda e: e.stem)
def test_every_model_without_a_formula_names_its_trace(ran: Ran, entry: Entry) -> None:
    code, _, err = ran("estimate", entry.stem, "--gpu", "l40s")
    counted = entry.family == "vit"  # as the classifier of images that it is, and not as a language model
    traced = any(f"memfit trace {what} --gpu l40s" in err for what in (entry.stem, "train.py"))
    assert code == 0 if counted else (code == 2 and traced)


def test_the_trace_that_a_refusal_names_can_be_typed(ran: Ran) -> None:
    pytest.importorskip("transformers")
    _, _, err = ran("estimate", next(e.stem for e in entries() if e.family.startswith("clip")), "--gpu", "l4")
    command = err.partition("memfit trace")[2].partition(",")[0]
    code, out, _ = ran("trace", *shlex.split(command))
    assert code == 0 and "clip-vit" in out


@pytest.mark.parametrize(("text", "length"), [("1k", 1024), ("2,048", 2048), ("0.5K", 512)])
def test_lengths_may_end_in_k(ran: Ran, text: str, length: int) -> None:
    code, out, _ = ran("estimate", *RUN, "--sequence-length", text, "--json")
    assert code in (0, 3, 4) and json.loads(out)["recipe"]["sequence_length"] == length


def test_a_wrong_length_is_refused_with_one_that_works(ran: Ran) -> None:
    code, _, err = ran("estimate", *RUN, "--sequence-length", "8kk")
    assert code == 2 and "--sequence-length" in err and "'8kk'" in err
    assert ran("estimate", *RUN, "--sequence-length", re.findall(r"\b\d+k\b", err)[0])[0] in (0, 3, 4)


def test_an_unquoted_name_with_a_space_says_to_quote_it(ran: Ran) -> None:
    code, _, err = ran("plan", MODEL, "--gpu", "m3", "max")
    assert code == 2 and "quotes" in err


def test_gpus_filters_by_words(ran: Ran) -> None:
    other = json.loads(ran("gpus", "t4", "--json")[1])
    some = json.loads(ran("gpus", "ada", "24gb", "--json")[1])
    assert {row["gpu"]["short"] for row in some["gpus"]} == {"rtx-4090", "l4"}
    assert some["prices_read"] == other["prices_read"] > "2026"
    assert ran("gpus", "no", "such")[0] == 2
    _, out, _ = ran("gpus", "4090")
    assert "GeForce RTX 4090" in out and "no rental price" in out


def test_any_gpu_without_a_card_answers_with_the_cheapest_that_fit(ran: Ran) -> None:
    code, out, _ = ran("plan", MODEL, "--any-gpu", "--method", "full", "--json")
    found = json.loads(out)
    assert code == 0 and found["verdict"] == "fits" and found["prices_read"]
    options = found["alternatives"]
    per_step = [a["price_per_hour"] * a["num_gpus"] * a["seconds_per_step"] for a in options]
    assert len(options) > 3 and per_step == sorted(per_step)
    assert all(a["judgement"]["verdict"] == "fits" for a in options)
    code, out, _ = ran("plan", MODEL, "--gpu", found["gpu"]["short"], "--method", "full", "--json")
    alone = json.loads(out)
    assert code == 0 and alone["recipe"] == found["recipe"] and alone["need"] == found["need"]
    own = next(g for g in list_gpus() if g.short == found["gpu"]["short"])
    assert (own.price_per_hour or 0) * alone["seconds_per_step"] <= per_step[0]
    next_best = next(g for g in list_gpus() if g.name == options[0]["gpu"])
    asked = json.loads(ran("plan", MODEL, "--gpu", next_best.short, "--method", "full", "--json")[1])
    assert (asked["recipe"], asked["need"]) == (options[0]["recipe"], options[0]["judgement"]["need"])


@pytest.mark.nightly
def test_any_gpu_takes_several_cards_where_one_does_not_do(ran: Ran) -> None:
    code, out, _ = ran("plan", "llama-3.1-405b", "--any-gpu", "--method", "qlora", "--micro-batch", "1", "--json")
    found = json.loads(out)
    assert found["gpu"]["count"] == found["recipe"]["num_gpus"]
    assert (code == 0) == (found["verdict"] == "fits")
    code, _, _ = ran("plan", MODEL, "--any-gpu", "--sequence-length", "8M", "--num-gpus", "1")
    assert code in (3, 4)  # nothing fits, and that is an answer


def test_data_says_what_is_cut_how_long_it_takes_and_never_pads_packed_rows(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in [*range(100, 200), 1000]))
    given = ("plan", MODEL, "--gpu", "l4", "--data", file, "--tokenizer", "bytes")
    found = json.loads(ran(*given, "--json")[1])
    assert found["job"]["samples"] == {
        "count": 101,
        "tokens": sum(range(100, 200)) + 1000 + 101,
        "cut": 1,
        "lost": 1001 - 256,
    }
    assert found["duration"]["steps"] == 7 and found["duration"]["cost"] > 0
    _, out, err = ran(*given, "--padding", "packing")
    assert "padded" not in out + err and "padding included" not in out
    assert "1 of 101 samples (1.0%)" in out and "packed rows" in out
    packed = json.loads(ran(*given, "--padding", "packing", "--json")[1])["duration"]
    assert packed["sequences"] < found["duration"]["sequences"]


def test_data_decides_the_sequence_length(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in [*range(100, 200), 1000]))
    code, out, err = ran("plan", *RUN, "--data", file, "--tokenizer", "bytes", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["recipe"]["sequence_length"] == found["job"]["sequence_length"] == 256
    assert found["job"]["longest_sample"] == 1001  # and its end-of-text token
    assert found["job"]["dataset"] == str(file)
    assert "--sequence-length 256 from the data" in err
    assert found["job"]["truncated"] == pytest.approx(1 / 101)
    assert "sequence 256 cuts 1.0% of the samples" in found["assumptions"]
    _, out, _ = ran("plan", *RUN, "--data", file, "--tokenizer", "bytes", "--sequence-length", "150")
    assert "sequence 150 cuts 50.5% of the samples" in out
    code, out, _ = ran("data", file, "--tokenizer", "bytes")
    assert code == 0
    assert "101 samples" in out
    assert "max 1,001" in out


def test_an_adopted_file_is_the_base_and_says_what_it_leaves_open(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(
        f"base_model: {MODEL}\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\nsequence_len: 512\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 4\noptimizer: adamw_torch\nbf16: true\nwhat_is_this: 7\n"
    )
    code, out, err = ran("estimate", "--from", file, "--gpu", CARD, "--json")
    assert (code, json.loads(out)["verdict"]) == (5, "not_judged")
    assert [found["key"] for found in json.loads(out)["not_understood"]] == ["what_is_this"]
    code, out, err = ran("estimate", "--from", file, "--gpu", CARD, "--ignore", "what_is_this", "--json")
    recipe = json.loads(out)["recipe"]
    assert code == 0
    assert (recipe["method"], recipe["lora_rank"], recipe["sequence_length"], recipe["micro_batch"]) == (
        "lora",
        8,
        512,
        2,
    )
    assert "what_is_this" in err
    found = json.loads(ran("plan", "--from", file, "--gpu", CARD, "--json")[1])
    assert (found["job"]["method"], found["job"]["effective_batch"]) == ("lora", 8)


# ---- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example_that_names_its_command(ran: Ran, name: str) -> None:
    module = import_module(f"memfit.cli.{name}")
    code, out, err = ran(name, "--help")
    assert (code, err) == (0, "")
    assert inspect.getdoc(module.run).splitlines()[0] == COMMANDS[name]  # `memfit --help` imports no command
    assert max(map(len, out.splitlines())) <= 80
    for line in module.EXAMPLES:
        assert line in out
        assert line.startswith(f"memfit {name}")


def test_memfit_alone_says_what_there_is(ran: Ran) -> None:
    code, out, _ = ran()
    assert code == 0
    for name in FLAGS:
        assert f"  {name} " in out
    assert not any(line.endswith("...") for line in out.splitlines()[1:])


def test_version(ran: Ran) -> None:
    code, out, err = ran("--version")
    assert (code, out.splitlines()[0], err) == (0, f"memfit {__version__}", "")


# ---- the process -----------------------------------------------------------------------------------------------------


def process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean | environment, check=False
    )


def test_plan_never_imports_the_heavy_or_the_network() -> None:
    heavy = (
        "torch",
        "transformers",
        "peft",
        "trl",
        "accelerate",
        "huggingface_hub",
        "tokenizers",
        "datasets",
        "requests",
        "httpx",
        "yaml",
    )
    done = process(
        f"import sys; from memfit.cli import main; main(['plan', '{MODEL}', '--gpu', '{CARD}'])\n"
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    assert done.stderr.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_turned_on_as_the_documentation_says(shell: str) -> None:
    said = (Path(__file__).parent.parent / "docs" / "install.md").read_text()
    assert f"_MEMFIT_COMPLETE={shell}_source memfit" in said
    words = {"COMP_WORDS": "memfit plan llama-3.1-", "COMP_CWORD": "2" if shell != "fish" else "llama-3.1-"}
    done = process("from memfit.cli import main; main()", _MEMFIT_COMPLETE=f"{shell}_complete", **words)
    assert "llama-3.1-8b" in done.stdout and done.stderr == ""


def test_version_and_help_import_no_physics() -> None:
    physics = ("memfit.closed_form", "memfit.models.families", "memfit.planner", "rich", "msgspec")
    done = process(
        "import sys; from memfit.cli import main; main(['--help'])\n"
        f"print([m for m in sys.modules if m.startswith({physics!r})], file=sys.stderr)"
    )
    assert done.stderr.strip() == "[]"


def test_a_closed_pipe_is_quiet() -> None:
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m memfit glossary | head -1; echo",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("accumulation")


@pytest.mark.parametrize("command", ["plan", "estimate", "techniques", "models", "glossary"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(command: str) -> None:
    words = [command, *(RUN if command in ("plan", "estimate", "techniques") else ())]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "memfit", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: the output cannot be written")
    assert hint.startswith("hint: ")
    assert "bug" not in done.stderr


@pytest.mark.parametrize(
    "words", [["trace", "{}", "--gpu", "l4"], ["watch", "{}"], ["export", "{}", "--target", "trl", "--out", "x"],
              ["plan", "llama-3.1-8b", "--gpu", "l4", "--no-trace", "--html", "{}"]],
)  # fmt: skip
def test_a_name_that_no_file_may_have_is_no_bug(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.format("x" * 400) for word in words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error:") and "bug" not in shown and len(shown) < 300


def test_closed_streams_are_no_bug() -> None:
    words = " ".join(map(shlex.quote, (sys.executable, "-m", "memfit", "models", "qwen3")))
    assert subprocess.run(f"{words} >&- 2>&-", shell=True, check=False).returncode == 0


def test_notes_that_nobody_reads_end_nothing() -> None:
    """stderr is a pipe whose reader has gone; the answer on stdout is whole."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [
        sys.executable,
        "-c",
        "import sys; from memfit.cli import main, terminal; terminal.note('x'); sys.exit(main())",
    ]
    done = subprocess.run([*words, "models", "qwen3"], stdout=subprocess.PIPE, stderr=writer, text=True, check=False)
    os.close(writer)
    assert "qwen3" in done.stdout.lower()


def test_rotary_positions_beyond_the_config_are_said(ran: Ran) -> None:
    _, out, _ = ran("estimate", "llama-2-7b", "--gpu", "h100", "--sequence-length", "16384")
    assert "sequence 16,384 is beyond the 4,096 positions" in out
    assert "beyond" not in ran("estimate", "llama-2-7b", "--gpu", "h100", "--sequence-length", "4096")[1]


@pytest.mark.parametrize(
    ("card", "words"),
    [("t4", "fp16 because Tesla T4 has no bf16 units"), ("arc-b60", "those of Intel's XPU are not modelled"),
     ("gaudi2", "those of Gaudi's HPU are not modelled"), ("mi300x", "ROCm's are not modelled")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_what_is_special_about_a_card_is_in_the_answer(ran: Ran, command: str, card: str, words: str) -> None:
    line = next(x for x in ran(command, MODEL, "--gpu", card)[1].splitlines() if x.startswith("assumed:"))
    assert words in line


def test_levels_are_called_what_they_are(ran: Ran) -> None:
    """NCCL's buffers are outside PyTorch's allocator, so they are no part of what is called reserved."""
    out = ran("plan", MODEL, "--gpu", f"2x{CARD}")[1]
    found = json.loads(ran("plan", MODEL, "--gpu", f"2x{CARD}", "--json")[1])
    nccl = found["need"] - found["peak"]["reserved"]
    assert nccl > 0
    assert found["peak"]["device"] == found["need"] + found["gpu"]["context_bytes"]
    for body in (found, *found["ladder"]):
        levels = [body["peak"][level] for level in ("requested", "allocated", "reserved", "device")]
        assert levels == sorted(levels)
    assert f"{found['peak']['reserved'] / 2**30:.1f} reserved + {nccl / 2**30:.1f} NCCL buffers" in out
    assert "reserved + NCCL" in out
    assert "reserved peak" not in out


def test_an_ascii_pipe_gets_ascii() -> None:
    done = process("from memfit.cli import main; main(['glossary', 'reserved'])", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert process(
        f"from memfit.cli import main; main(['estimate', '{MODEL}', '--gpu', '{CARD}'])", PYTHONIOENCODING="ascii"
    ).stdout.isascii()


def test_a_terminal_gets_the_bar_and_stays_inside_80_columns() -> None:
    done = process(
        f"from memfit.cli import main; main(['plan', '{MODEL}', '--gpu', '{CARD}'])",
        FORCE_COLOR="1", TERM="dumb", COLUMNS="80", LINES="40",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert any(line.startswith("│") and "╎" in line for line in lines)
    assert any(line.startswith("▶") for line in lines) or "fp32" not in done.stdout
    assert max(len(line.rstrip()) for line in lines if "memfit " not in line) <= 80
