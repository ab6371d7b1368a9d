"""Weights of a checkpoint are those that were saved, whatever saving made of them: a resumed run ends undisturbed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # the libraries' own

import runs  # noqa: E402
from memfit.errors import BadInput  # noqa: E402
from memfit.nouns.job import Recipe  # noqa: E402
from memfit.train.attempt import _module, attempt, load  # noqa: E402
from memfit.train.checkpoints import seal  # noqa: E402
from memfit.train.folder import Run, write_json  # noqa: E402
from memfit.train.supervise import supervise  # noqa: E402
from runs import failing, lines, silent, stopping_at, weights  # noqa: E402

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def mixture(kind: str, made: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    """A model of experts with the tokenizer and the data of the usual one."""
    import transformers

    config, model = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    more = EXPERTS if kind == "Qwen3Moe" else {"num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    shutil.copytree(made[0], place)
    for old in ("config.json", "model.safetensors", "generation_config.json"):
        (place / old).unlink(missing_ok=True)
    sizes = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    model(config(**runs.SMALL, **more, **sizes)).save_pretrained(place)
    return place, made[1]


def disturbed(run: Run) -> None:
    """Stopped, out of memory, and at its end all the same."""
    assert supervise(run, stopping_at(2), silent).status == "stopped"
    assert supervise(run, failing("optimizer step", 3), silent).status == "done" and len(run.falls) == 1


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_are_resumed_with_what_they_learned(made: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    model = mixture(kind, made, tmp_path / "model")
    recipe = runs.RECIPE.but(checkpointing="full", micro_batch=1, accumulation=4)  # a fall changes the optimizer alone
    whole, run = (runs.make_run(tmp_path / name, model, recipe) for name in ("whole", "run"))
    assert supervise(whole, attempt, silent).status == "done"
    assert supervise(run, stopping_at(3), silent).status == "stopped"
    assert supervise(run, attempt, silent).status == "done"
    assert lines(run) == lines(whole)
    assert all(torch.equal(t, weights(whole)[name]) for name, t in weights(run).items())
    learned = [name for name in weights(whole) if "experts" in name or name.endswith("gate.weight")]
    base = runs.load_file(model[0] / "model.safetensors")
    assert learned and not any(torch.equal(weights(whole)[name], base[name]) for name in learned)
    again = runs.make_run(tmp_path / "again", (run.output, made[1]), recipe)  # what was made can be trained on
    assert supervise(again, attempt, silent).status == "done"


@pytest.mark.parametrize("trainer", ["trl", "transformers"])
def test_the_script_alone_resumes_experts_too(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    recipe = Recipe(precision="fp32", micro_batch=4, sequence_length=32, trainer=trainer)
    run = runs.make_run(tmp_path / "run", mixture("Mixtral", made, tmp_path / "model"), recipe)
    whole, again = tmp_path / "whole", tmp_path / "again"
    for place, more in ((whole, []), (again, ["--resume", str(whole / "checkpoint-2")])):
        words = ["train.py", "--cpu", "--output", str(place), "--max-steps", "4", *more]
        monkeypatch.setattr("sys.argv", words)
        _module(run.path / "train.py").main()
    found, undisturbed = (runs.load_file(place / "model.safetensors") for place in (again, whole))
    assert all(torch.equal(t, found[key]) for key, t in undisturbed.items())
    half = runs.load_file(whole / "checkpoint-2" / "model.safetensors")
    assert not any(torch.equal(t, found[key]) for key, t in half.items() if "experts" in key)


def test_a_checkpoint_of_another_model_is_not_resumed(made: tuple[Path, Path], tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run", mixture("Mixtral", made, tmp_path / "model"))
    assert supervise(run, stopping_at(3), silent).status == "stopped"
    last = run.last_good()
    assert last is not None
    saved = runs.load_file(last.path / "model.safetensors")
    runs.save_file(
        {n: t for n, t in saved.items() if "experts" not in n}, last.path / "model.safetensors", {"format": "pt"}
    )
    marks = {"step": last.step, "samples": last.samples, "by_process": last.by_process, "optimizer": last.optimizer}
    seal(last.path, {**marks, "evaluate": last.evaluate}, write_json)
    with pytest.raises(BadInput, match="does not hold the weights of this model"):
        supervise(run, attempt, silent)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_keep_their_format(made: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    """Resumed in float32 they would round and need other bytes than the run that was planned."""
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    recipe = runs.RECIPE.but(
        method=method, quantization="nf4" if method == "qlora" else "none", precision="bf16", lora_rank=4
    )
    whole, run = (runs.make_run(tmp_path / name, made, recipe) for name in ("whole", "run"))
    assert supervise(whole, attempt, silent).status == "done"
    assert supervise(run, stopping_at(3), silent).status == "stopped"
    last = run.last_good()
    trainer = load(run, run.settings)
    before = {name: w.dtype for name, w in trainer.model.named_parameters()}
    assert last is not None
    trainer._load_from_checkpoint(str(last.path))
    assert {name: w.dtype for name, w in trainer.model.named_parameters()} == before
    assert supervise(run, attempt, silent).status == "done"
    name = "adapter_model.safetensors"
    assert all(torch.equal(t, weights(whole, name)[key]) for key, t in weights(run, name).items())


def test_adapters_of_the_plain_trainer_begin_alike(made: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = Recipe(
        precision="fp32", micro_batch=4, sequence_length=32, method="lora", lora_rank=4, trainer="transformers"
    )
    found = []
    for name in ("one", "two"):
        run = runs.make_run(tmp_path / name, made, recipe)
        torch.randn(3)  # whatever was drawn before
        found.append({key: w for key, w in load(run, run.settings).model.named_parameters() if "lora_A" in key})
    assert found[0] and all(torch.equal(w, found[1][key]) for key, w in found[0].items())
