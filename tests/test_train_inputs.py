"""A run resumes only with the data and the model it began with; a finished run needs neither."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # the libraries' own

import runs  # noqa: E402
from conftest import Ran  # noqa: E402
from memfit.errors import BadInput  # noqa: E402
from memfit.train.attempt import attempt  # noqa: E402
from memfit.train.folder import Run  # noqa: E402
from memfit.train.outcome import Event  # noqa: E402
from memfit.train.run_file import write_json  # noqa: E402
from memfit.train.supervise import _digest_of_model, supervise  # noqa: E402
from runs import failing, lines, silent, stopping_at  # noqa: E402


@pytest.fixture
def own(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A model and data that a test may spoil."""
    return copied(made, tmp_path)


def copied(made: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    """A model's folder and its data, copied to a place."""
    model = place / "model"
    shutil.copytree(made[0], model)
    return model, Path(shutil.copy(made[1], place / "data.txt"))


@pytest.fixture(scope="module")
def stopped_once(one_thread: None, made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that stopped after three steps, its model and its data, and a copy of the whole aside."""
    place = tmp_path_factory.mktemp("stopped")
    supervise(runs.make_run(place / "now" / "run", copied(made, place / "now")), stopping_at(3), silent)
    shutil.copytree(place / "now", place / "aside")
    return place


@pytest.fixture
def stopped(stopped_once: Path) -> Path:
    """The folder of the stopped run, as the stop left it: runs know their data by path."""
    shutil.rmtree(stopped_once / "now")
    shutil.copytree(stopped_once / "aside", stopped_once / "now")
    return stopped_once / "now"


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ("fewer", "data.txt has changed since the run began"),
        ("another order", "data.txt has changed since the run began"),
        ("gone", "data.txt, which the run reads, is gone"),
        ("tokenizer", "model has changed since the run began"),
        ("weights", "model has changed since the run began"),
        ("recipe", "recipe.toml was edited"),
        ("script", "train.py was edited"),
    ],
)
def test_a_run_whose_inputs_changed_is_not_resumed(
    ran: Ran, stopped: Path, in_this_process: list[Path], spoilt: str, said: str
) -> None:
    run, model, data = Run(stopped / "run"), stopped / "model", stopped / "data.txt"
    rows = data.read_text().splitlines(keepends=True)
    weights, tokens, recipe = model / "model.safetensors", model / "tokenizer.json", run.path / "recipe.toml"
    written, script = recipe.read_text(), run.path / "train.py"
    if spoilt == "gone":
        data.unlink()
    elif spoilt == "tokenizer":
        tokens.write_text(tokens.read_text() + "\n")
    elif spoilt == "weights":
        weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    elif spoilt == "script":
        script.write_text(script.read_text() + "\n")
    elif spoilt == "recipe":
        recipe.write_text(written.replace("learning_rate = ", "learning_rate = 1"))
        assert recipe.read_text() != written
    else:
        data.write_text("".join(rows[:10] if spoilt == "fewer" else rows[::-1]))
    before = files(run)
    code, _, err = ran("train", "--out", run.path, "--resume")
    assert code == 2 and said in err and "hint:" in err
    assert files(run) == before and not in_this_process
    if spoilt == "script":  # put aside, it is written again; a step that the record lost is counted as missing
        script.rename(script.with_name("train.py.edited"))
        record = run.path / "samples.jsonl"
        record.write_bytes(record.read_bytes().replace(b'"samples": 4', b'"samples": 5', 1))
        _, out, err = ran("train", "--out", run.path, "--resume")
        assert "samples.jsonl lists 8 of the 12 samples" in err and "lists 18 of 22 samples" in out, (out, err)
        assert script.read_text() + "\n" == script.with_name("train.py.edited").read_text()
    if spoilt in ("fewer", "another order", "gone", "recipe"):
        data.write_text("".join(rows))
        recipe.write_text(written)
        (model / "README.md").write_text("not read")
        assert ran("train", "--out", run.path, "--resume")[0] == 0 and len(in_this_process) == 1


def files(run: Run) -> dict[Path, bytes]:
    """All that a run keeps."""
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"}


def test_data_that_change_between_two_rungs_are_seen(own: tuple[Path, Path], tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run", own)

    def spoil(event: Event) -> None:
        if event["event"] == "fall":
            own[1].write_text("other\n" * runs.SAMPLES)

    with pytest.raises(BadInput, match="has changed since the run began"):
        supervise(run, failing("forward and backward", 3), spoil)
    assert len(run.falls) == 1 and (last := run.last_good()) is not None and last.step == 3


def test_other_evaluation_data_are_told_of(own: tuple[Path, Path], tmp_path: Path) -> None:
    other, told = tmp_path / "eval.txt", list[Event]()
    other.write_text("one\ntwo\n")
    run = runs.make_run(tmp_path / "run", own, eval_data=str(other))
    supervise(run, stopping_at(3), silent)
    other.write_text("one\ntwo\nthree\n")
    assert supervise(run, attempt, told.append).status == "done"
    assert [event["text"] for event in told if event["event"] == "warning" and "eval.txt has changed" in event["text"]]


def test_large_weights_are_known_by_samples(own: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = own
    monkeypatch.setattr("memfit.train.supervise.LARGE", 1 << 12)
    monkeypatch.setattr("memfit.train.supervise.SAMPLE", 1 << 9)
    path = model / "model.safetensors"
    whole, found = path.read_bytes(), set()
    assert len(whole) > 1 << 13
    for data in (whole, whole[:-1] + b"\x7f", b"\x7f" + whole[1:], whole + b"\0"):
        path.write_bytes(data)
        found.add(_digest_of_model(model))
    assert len(found) == 4


def test_a_run_that_is_done_reads_nothing_again(
    ran: Ran, own: tuple[Path, Path], tmp_path: Path, in_this_process: list[Path]
) -> None:
    """Adapters are merged without the data; a run that lost its model is trained to its end again."""
    run = runs.make_run(tmp_path / "run", own, runs.RECIPE.but(method="lora", lora_rank=4), max_steps=2)
    assert ran("train", "--out", run.path, "--resume")[0] == 0
    outcome, counted = run.outcome, lines(run)
    card = (run.output / "README.md").read_text()
    assert str(tmp_path.parent) not in card and own[0].name in card  # it is made to be shared
    (run.output / "README.md").write_text(card + "\nmine\n")
    rows = own[1].read_text()
    own[1].unlink()
    code, out, err = ran("train", "--out", run.path, "--resume", "--merge")
    assert code == 0 and "done: step 2 of 2" in out and "nothing is trained" in err, err
    assert (run.path / "merged" / "model.safetensors").exists()
    assert (run.output / "README.md").read_text() == card + "\nmine\n"
    assert (run.outcome, lines(run)) == (outcome, counted)
    (run.output / "README.md").write_text(
        "---\nlibrary_name: peft\n---\nof a library\n"
    )  # ended before ours was written
    assert ran("train", "--out", run.path, "--resume")[0] == 0 and (run.output / "README.md").read_text() == card
    assert len(in_this_process) == 1
    (run.path / "outcome.json").write_text("{")  # cut off: it says nothing
    assert run.finished() is None
    write_json(run.path / "outcome.json", asdict(outcome))
    adapters = run.output / "adapter_model.safetensors"
    adapters.write_bytes(adapters.read_bytes()[:-8] + bytes(8))
    code, _, err = ran("train", "--out", run.path, "--resume")
    assert code == 2 and "is gone" in err and run.outcome == outcome and len(in_this_process) == 1
    own[1].write_text(rows)
    assert ran("train", "--out", run.path, "--resume")[0] == 0 and lines(run) == counted
    assert adapters.exists() and len(in_this_process) == 2
    assert (run.path / "damaged" / adapters.name).exists() and not run.lost_model(run.outcome)
