"""The command line as a person and a script meet it: output, exit codes, errors, flags and what is never imported."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import Recipe, __version__, cli, codec
from memfit.cli import flags as flag_table
from memfit.cli.flags import as_flags, recipe_values
from memfit.cli.tree import COMMANDS
from memfit.optimizers import OPTIMIZERS
from memfit.recipe_file import loads

MODEL, CARD = "qwen2.5-0.5b", "rtx-4060"
RUN = (MODEL, "--gpu", CARD)
Ran = Callable[..., tuple[int, str, str]]
COMMON = ["--json", "--debug", "--help"]
CARDS = ["--gpu", "--gpu-memory", "--reserve"]
RECIPE = ["--method", "--precision", "--quantization", "--lora-rank", "--lora-alpha", "--lora-dropout", "--lora-targets", "--optimizer",
          "--micro-batch", "--accumulation", "--sequence-length", "--padding", "--checkpointing", "--attention", "--loss", "--offload",
          "--shard", "--num-gpus", "--trainer", "--alloc-conf"]  # fmt: skip
OUT = ["--out", "--target", "--force"]
FLAGS = {
    "plan": [
        *CARDS,
        "--any-gpu",
        "--trace",
        "--no-trace",
        "--effective-batch",
        "--data",
        "--tokenizer",
        "--from",
        *OUT,
        "--save-tape",
        *RECIPE,
        *COMMON,
    ],
    "estimate": [*CARDS, "--from", "--why", "--save-tape", "--force", *RECIPE, *COMMON],
    "trace": [
        *CARDS,
        "--data",
        "--tokenizer",
        "--from",
        "--steps",
        "--answer",
        "--save-tape",
        "--snapshot",
        "--html",
        "--force",
        *RECIPE,
        *COMMON,
    ],
    "watch": ["--predicted", "--log", "--every", "--measure", "--to", "--live", *COMMON],
    "compare": ["--gpu", *COMMON],
    "train": [
        *CARDS,
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
    "techniques": [*CARDS, "--effective-batch", *RECIPE, *COMMON],
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
    "data": ["--tokenizer", "--text-field", "--limit", "--micro-batch", *COMMON],
    "glossary": COMMON,
    "export": ["--gpu", *OUT, *COMMON],
    "launch": ["--gpu", "--target", "--nodes", "--hours", "--image", "--out", "--submit", "--force", *COMMON],
}


# ---- what is promised to scripts -------------------------------------------------------------------------------------


def test_the_flags_are_frozen() -> None:
    """Scripts are written against these: add, but never rename or drop without a word in the changelog."""
    tree = cli.app
    found = {
        name: [o for p in command.params for o in p.opts if o.startswith("--")]
        for name, command in tree.commands.items()  # type: ignore[attr-defined]
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
        (("plan", "llama-3.1-405b", "--gpu", CARD, "--method", "lora"), 3),
        (("techniques", *RUN), 0),
        (("glossary",), 0),
    ],
)
def test_exit_codes_say_the_verdict(ran: Ran, arguments: tuple[str, ...], code: int) -> None:
    assert ran(*arguments)[0] == code


def test_too_tight_to_promise_is_four(ran: Ran) -> None:
    """A card with exactly the memory the peak needs leaves nothing for being wrong."""
    need = json.loads(ran("estimate", *RUN, "--json")[1])["need"]
    code, out, _ = ran("estimate", MODEL, "--gpu-memory", f"{need + 500 * 2**20 + 2**20}")
    assert (code, "TOO TIGHT" in out) == (4, True)


@pytest.mark.parametrize("command", ["plan", "estimate", "techniques"])
def test_json_is_a_document_and_nothing_else(ran: Ran, command: str) -> None:
    _, out, err = ran(command, *RUN, "--json", "--trainer", "transformers")
    assert codec.loads(out).schema == f"memfit.{command}/1"
    assert "{" not in err


@pytest.mark.parametrize("arguments", [("gpus", "h200"), ("models", "qwen3"), ("glossary",), ("glossary", "peak")])
def test_lists_have_json_too(ran: Ran, arguments: tuple[str, ...]) -> None:
    code, out, err = ran(*arguments, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["schema"] == f"memfit.{arguments[0]}/1"


@pytest.mark.parametrize(
    "arguments",
    [("plan", *RUN), ("estimate", *RUN, "--why"), ("techniques", *RUN), ("gpus", "h100"), ("models", "llama")],
)
def test_a_pipe_gets_text_that_grep_can_use(ran: Ran, arguments: tuple[str, ...]) -> None:
    _, out, _ = ran(*arguments)
    assert "\x1b" not in out
    assert not set("│╎█■─┃") & set(out)
    assert all(line == line.rstrip() for line in out.splitlines())


def test_one_fact_is_one_line_in_a_pipe(ran: Ran) -> None:
    _, out, _ = ran("plan", "llama-2-7b", "--gpu", "rtx-4090")
    lines = out.splitlines()
    assert sum("LoRA r16" in line and line.startswith("FITS") for line in lines) == 1
    assert any(line.startswith("parameters") and line.split()[2] == "GiB" for line in lines)


def test_the_answer_is_the_same_for_a_person_and_a_script(ran: Ran) -> None:
    _, text, _ = ran("estimate", *RUN)
    _, data, _ = ran("estimate", *RUN, "--json")
    assert f"peak {json.loads(data)['need'] / 2**30:.1f} GiB reserved" in text


def test_a_flag_without_effect_is_said(ran: Ran) -> None:
    assert "--lora-rank without effect" in ran("estimate", *RUN, "--lora-rank", "4")[2]
    assert "without effect" not in ran("estimate", *RUN, "--lora-rank", "4", "--method", "lora")[2]


def test_a_flag_is_honoured_to_the_letter(ran: Ran) -> None:
    wanted = {
        "optimizer": "sgd",
        "micro_batch": 2,
        "checkpointing": "none",
        "sequence_length": 512,
        "precision": "bf16",
    }
    words = [w for k, v in wanted.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    found = json.loads(ran("plan", *RUN, *words, "--json")[1])
    assert {k: found["recipe"][k] for k in wanted} == wanted
    assert found["job"]["wanted"] == wanted
    assert found["job"]["effective_batch"] == 16


def test_several_cards_can_be_said_either_way(ran: Ran) -> None:
    one = ran("plan", MODEL, "--gpu", f"2x{CARD}", "--json")[1]
    two = ran("plan", MODEL, "--gpu", CARD, "--num-gpus", "2", "--json")[1]
    assert one == two
    assert json.loads(one)["gpu"]["count"] == 2


def test_reserve_and_gpu_memory_change_what_is_usable(ran: Ran) -> None:
    usable = [
        json.loads(ran("estimate", *RUN, *more, "--json")[1])["usable"]
        for more in ((), ("--reserve", "1GiB"), ("--gpu-memory", "6GiB"))
    ]
    assert usable[0] - usable[1] == 2**30
    assert usable[2] < 6 * 2**30


# ---- errors ----------------------------------------------------------------------------------------------------------

MISTAKES = {
    "no model given": ("plan",),
    "unknown model": ("plan", "no-such-model", "--gpu", CARD),
    "unknown GPU": ("plan", MODEL, "--gpu", "rtx-9999"),
    "could be 4 GPUs": ("plan", MODEL, "--gpu", "a100"),
    "--precision cannot be": ("estimate", *RUN, "--precision", "bf17"),
    "--lora-rank must be": ("estimate", *RUN, "--lora-rank", "0"),
    "invalid value for '--lora-rank'": ("estimate", *RUN, "--lora-rank", "x"),
    "no such option": ("plan", *RUN, "--bogus"),
    "no such command": ("bogus",),
    "missing argument": ("data",),
    "requires an argument": ("plan", MODEL, "--gpu"),
    "--method auto is for memfit plan": ("estimate", *RUN, "--method", "auto"),
    "choose one of auto, full, lora, qlora": ("plan", *RUN, "--method", "foo"),
    "no positions that far": ("plan", "gpt2", "--gpu", CARD, "--sequence-length", "4096"),
    "sharding needs more than one GPU": ("plan", *RUN, "--shard", "parameters"),
    "bitsandbytes has no optimizers": ("estimate", MODEL, "--gpu", "gaudi2", "--optimizer", "adamw-8bit"),
    "no bf16 units": ("estimate", MODEL, "--gpu", "t4", "--precision", "bf16"),
    "unknown optimizer": ("plan", *RUN, "--optimizer", "adamx"),
    "unknown trainer": ("plan", *RUN, "--trainer", "nemo"),
    "unknown LoRA module 'foo'": ("plan", *RUN, "--lora-targets", "q_proj,foo"),
    "names no module": ("plan", *RUN, "--lora-targets", ","),
    "say it once": ("plan", MODEL, "--gpu", f"2x{CARD}", "--num-gpus", "4"),
    "leaves nothing": ("plan", *RUN, "--reserve", "99GiB"),
    "is not a size": ("plan", *RUN, "--reserve", "much"),
    "need --out": ("plan", *RUN, "--target", "trl"),
    "unknown export target": ("plan", *RUN, "--target", "keras", "--out", "x"),
    "--tokenizer needs --data": ("plan", *RUN, "--tokenizer", "bytes"),
    "does not exist": ("plan", *RUN, "--data", "/no/such/file.jsonl"),
    "is 8, not --effective-batch 16": ("plan", *RUN, "--micro-batch", "2", "--accumulation", "4", "--effective-batch", "16"),
    "no multiple of 3": ("plan", *RUN, "--micro-batch", "3", "--effective-batch", "16"),
    "--effective-batch must be": ("plan", *RUN, "--effective-batch", "0"),
    "there is no file": ("plan", *RUN, "--from", "/no/such/file.yaml"),
    "--out is missing": ("export", "recipe.toml"),
    "unknown term": ("glossary", "xyzzy"),
    "--micro-batch must be at least 1": ("data", "x.jsonl", "--micro-batch", "0"),
    "not modelled": ("estimate", "t5-3b", "--gpu", CARD),
}  # fmt: skip


@pytest.mark.parametrize(("message", "arguments"), list(MISTAKES.items()), ids=list(MISTAKES))
def test_a_mistake_is_one_line_a_hint_and_exit_2(ran: Ran, message: str, arguments: tuple[str, ...]) -> None:
    code, out, err = ran(*arguments)
    assert code == 2
    assert out == ""
    error, hint = err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert message in err
    assert hint.startswith("hint: ")
    assert len(hint) > len("hint: ") + 3
    assert "Traceback" not in err


NUMBERS = ("0", "-1", "1e30", "nan", "inf", "", " ", "½", "0x10", "1,000", "99999999999999999999999999")
SIZES = ("0", "-1GiB", "1e30GiB", "9" * 400 + "GiB", "99999999999TiB", " ", "nan", "GiB", "1.5.2GB")
COUNTED = ("--micro-batch", "--accumulation", "--sequence-length", "--lora-rank", "--num-gpus", "--effective-batch")


def refused(ran: Ran, *words: object) -> str:
    code, out, err = ran(*words)
    assert (code, out) == (2, ""), (words, err)
    error, hint = err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert len(error) < 600
    return err


@pytest.mark.parametrize("flag", COUNTED)
def test_no_number_whatever_is_a_bug(ran: Ran, flag: str) -> None:
    for number in NUMBERS:
        assert refused(ran, "plan", *RUN, f"{flag}={number}")


@pytest.mark.parametrize("flag", ["--gpu-memory", "--reserve"])
def test_no_size_whatever_is_a_bug(ran: Ran, flag: str) -> None:
    for size in SIZES:
        if (flag, size) != ("--reserve", "0"):
            assert refused(ran, "estimate", *RUN, f"{flag}={size}")


@pytest.mark.parametrize("command", ["plan", "estimate", "techniques"])
@pytest.mark.parametrize(
    "model", ["", " ", "a\0b", "../..", "a/" * 600, "--", "org/" + "x" * 3000, "~nobody/x", "/dev/null", "💥"]
)
def test_no_name_whatever_is_a_bug(ran: Ran, monkeypatch: pytest.MonkeyPatch, command: str, model: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refused(ran, command, f"{model}", "--gpu", CARD)


HOSTILE = {
    "binary.yaml": b"\x00\xff\xfe" * 500, "empty.json": b"", "broken.json": b'{"a":', "list.json": b"[1, 2]", "deep.json": b"[" * 100_000,
    "cycle.yaml": b"a: &a [*a]\n", "huge.yaml": None, "huge.json": None, "negative.yaml": b"base_model: gpt2\nmicro_batch_size: -1\n",
    "float.yaml": b"base_model: gpt2\nmicro_batch_size: 1e30\n", "stage.json": b'{"zero_optimization": {"stage": 9}}',
    "zero.json": b'{"train_batch_size": 0, "train_micro_batch_size_per_gpu": 0, "zero_optimization": {"stage": 0}}',
    "wrong.toml": b'schema = 1\n[job]\nmodel = "gpt2"\n[recipe]\nmicro_batch = 0\n', "config.json": b'{"model_type": "llama", "hidden_size": -1}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_file_whatever_is_a_bug(ran: Ran, tmp_path: Path, name: str) -> None:
    path, says = tmp_path / name, HOSTILE[name]
    path.write_bytes(says or b"")
    if says is None:
        os.truncate(path, 5 << 30)  # sparse: it takes no room
    assert refused(ran, "plan", MODEL, "--from", path, "--gpu", CARD)
    if name.endswith(".json"):
        assert refused(ran, "estimate", path, "--gpu", CARD)


@pytest.mark.parametrize("flag", ["--from", "--data"])
def test_a_folder_is_no_file(ran: Ran, tmp_path: Path, flag: str) -> None:
    assert refused(ran, "plan", MODEL, flag, tmp_path, "--gpu", CARD)


def test_more_than_the_allocator_can_hold_is_still_an_answer(ran: Ran) -> None:
    code, out, _ = ran("estimate", *RUN, "--sequence-length", "16777216", "--micro-batch", "16777216")
    assert (code, "DOES NOT FIT" in out) == (3, True)


def test_a_bug_is_one_line_that_asks_to_be_reported(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.verdicts.judge", lambda *a: 1 // 0)
    code, out, err = ran("estimate", *RUN)
    assert (code, out) == (1, "")
    error, hint = err.splitlines()[-2:]
    assert error.startswith("error: ZeroDivisionError")
    assert "report" in hint
    assert "--debug" in hint
    with pytest.raises(ZeroDivisionError):
        ran("estimate", *RUN, "--debug")


def test_ctrl_c_is_quiet(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.hub.resolve_model", interrupted)
    assert ran("estimate", *RUN) == (130, "", "")


def test_hostile_names_do_not_steer_the_terminal(ran: Ran) -> None:
    code, _, err = ran("plan", "\x1b[2Jevil\nerror: x", "--gpu", CARD)
    assert code == 2
    assert "\x1b" not in err
    assert len(err.splitlines()) == 2


@given(st.lists(st.text(min_size=1, max_size=12), max_size=4))
def test_no_words_whatever_make_a_traceback(words: list[str]) -> None:
    if "--debug" in words:
        return
    assert cli.main(["estimate", MODEL, "--gpu", CARD, *words]) in (0, 2)


# ---- the same flags again --------------------------------------------------------------------------------------------

RECIPES = st.builds(
    Recipe,
    **{f.name: st.sampled_from(choices) for f in fields(Recipe) if (choices := [c for c in get_args(get_type_hints(Recipe)[f.name]) if isinstance(c, str)])},
    lora_rank=st.integers(1, 512), lora_alpha=st.integers(1, 512), lora_dropout=st.sampled_from([0.0, 0.05, 0.5]),
    lora_targets=st.sampled_from([("all-linear",), ("q_proj", "v_proj")]), optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    micro_batch=st.integers(1, 64), accumulation=st.integers(1, 64), sequence_length=st.integers(1, 1 << 17), num_gpus=st.integers(1, 64),
    trainer=st.sampled_from(["trl", "trl==1.3", "torch"]), alloc_conf=st.sampled_from(["", "expandable_segments:True"]),
)  # fmt: skip


@given(RECIPES)
def test_flags_written_for_a_recipe_make_that_recipe(recipe: Recipe) -> None:
    command = cli.app.commands["estimate"]  # type: ignore[attr-defined]
    with command.make_context("estimate", [MODEL, *as_flags(recipe)]) as context:
        assert Recipe(**recipe_values(context.params)) == recipe


@pytest.mark.parametrize(
    "arguments", [("plan", *RUN), ("plan", "llama-2-7b", "--gpu", "rtx-4090"), ("estimate", *RUN, "--method", "qlora")]
)
def test_every_command_we_suggest_runs(ran: Ran, arguments: tuple[str, ...], tmp_path: Path) -> None:
    _, out, _ = ran(*arguments)
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("next: "))
    suggested = [line.removeprefix("next: ").strip() for line in lines[start:]]
    assert len(suggested) >= 2
    for line in suggested:
        words = shlex.split(line.replace("run/", str(tmp_path / "run")))
        assert words[0] == "memfit"
        assert ran(*words[1:])[0] in (0, 3, 4), line


def test_the_suggested_estimate_is_about_the_chosen_recipe(ran: Ran) -> None:
    _, out, _ = ran("plan", *RUN)
    line = next(line for line in out.splitlines() if "--why" in line)
    chosen = json.loads(ran("plan", *RUN, "--json")[1])
    again = json.loads(ran(*shlex.split(line.split("memfit", 1)[1]), "--json")[1])
    assert (again["recipe"], again["peak"]) == (chosen["recipe"], chosen["peak"])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_plan_out_writes_files_that_come_back(ran: Ran, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, err = ran("plan", *RUN, "--out", folder, "--target", "trl")
    assert code == 0
    assert "FITS" in out
    assert f"wrote {folder / 'recipe.toml'}" in err
    written = loads((folder / "recipe.toml").read_text())
    same = json.loads(ran("estimate", "--from", folder / "recipe.toml", "--json")[1])
    assert same["recipe"]["micro_batch"] == written.recipe.micro_batch
    assert same["gpu"]["short"] == CARD
    code, _, err = ran("plan", *RUN, "--out", folder)
    assert (code, "already holds" in err, "--force" in err) == (2, True, True)
    assert ran("plan", *RUN, "--out", folder, "--force")[0] == 0


def test_export_turns_a_recipe_into_other_files(ran: Ran, tmp_path: Path) -> None:
    ran("plan", *RUN, "--out", tmp_path / "run")
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
    code, out, err = ran("plan", "llama-3.1-405b", "--gpu", CARD, "--method", "lora", "--out", tmp_path / "run")
    assert code == 2
    assert "DOES NOT FIT" in out
    assert "no files were written" in err
    assert not (tmp_path / "run").exists()


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


@pytest.mark.parametrize("module", COMMANDS, ids=lambda m: m.__name__)
def test_every_help_has_an_example_that_names_its_command(ran: Ran, module: Any) -> None:
    name = module.__name__.rsplit(".", 1)[-1]
    code, out, err = ran(name, "--help")
    assert (code, err) == (0, "")
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
    assert ran("--version") == (0, f"memfit {__version__}\n", "")


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


def test_version_and_help_import_no_physics() -> None:
    done = process(
        "import sys; from memfit.cli import main; main(['--help'])\n"
        "print([m for m in sys.modules if m.startswith(('memfit.formula', 'memfit.families', 'memfit.planner', 'rich', 'msgspec'))], file=sys.stderr)"
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


def test_closed_streams_are_no_bug() -> None:
    words = " ".join(map(shlex.quote, (sys.executable, "-m", "memfit", "models", "qwen3")))
    assert subprocess.run(f"{words} >&- 2>&-", shell=True, check=False).returncode == 0


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
