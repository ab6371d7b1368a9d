"""recipe.toml: what is written is read back unchanged, and everything else is refused in words."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.documents import recipe_file
from memfit.errors import BadInput, Unsupported
from memfit.nouns.job import TRAINING_RANGES, Columns, Recipe, RecipeFile, Training
from memfit.nouns.zero_settings import NAMES as ZERO_SIZES

WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def recipes() -> st.SearchStrategy[Recipe]:
    """Every valid Recipe: all choices, numbers in range, any text where text is free."""
    hints = get_type_hints(Recipe)
    drawn: dict[str, st.SearchStrategy[Any]] = {}
    for field in dataclasses.fields(Recipe):
        choices = get_args(hints[field.name])
        if choices and isinstance(choices[0], str):
            drawn[field.name] = st.sampled_from(choices)
        elif hints[field.name] is bool:
            drawn[field.name] = st.booleans()
        elif hints[field.name] is int:
            drawn[field.name] = st.integers(1, 1 << 24)
        elif hints[field.name] is float:
            drawn[field.name] = st.floats(0, 1, exclude_max=True)
        elif hints[field.name] is str:
            drawn[field.name] = WORDS
        else:
            drawn[field.name] = st.lists(WORDS, max_size=4).map(tuple)
    drawn["lora_targets"] = st.lists(WORDS, min_size=1, max_size=4).map(tuple)
    drawn["fsdp_version"] = st.sampled_from((1, 2))
    sizes = st.dictionaries(st.sampled_from(ZERO_SIZES), st.integers(0, 1 << 40), max_size=3)
    drawn["zero_conf"] = sizes.map(lambda found: ",".join(f"{name}:{size}" for name, size in found.items()))
    return st.builds(Recipe, **drawn)


RATES = {name: st.floats(*TRAINING_RANGES[name]) for name in ("learning_rate", "epochs")}
RATES["save_steps"] = st.floats(1e-6, 1) | st.integers(1, 10**9).map(float)
COLUMNS = st.builds(Columns, fields=st.lists(WORDS, min_size=1, max_size=3).map(tuple), chat=st.booleans(), role=WORDS)
TRAININGS = st.just(Training()) | st.builds(
    Training, max_steps=st.integers(1, 10**9), eval_data=WORDS, lr_scheduler=WORDS, pad_token=WORDS,
    warmup=st.floats(0, 1e9), weight_decay=st.floats(1e-9, 100), seed=st.integers(0, 2**32 - 1),
    save_strategy=st.sampled_from(["", "epoch", "no"]), columns=st.none() | COLUMNS, **RATES,
)  # fmt: skip
FILES = st.builds(
    RecipeFile, model=WORDS, recipe=recipes(), gpu=WORDS, data=WORDS, training=TRAININGS,
    not_understood=st.lists(WORDS, max_size=2).map(tuple),
    gpu_memory=st.integers(0, 1 << 40), effective_batch=st.integers(0, 1 << 20), longest_sample=st.integers(0, 1 << 20),
)  # fmt: skip


@settings(deadline=None)
@given(FILES)
def test_round_trip_is_the_identity(file: RecipeFile) -> None:
    assert recipe_file.loads(recipe_file.dumps(file)) == file


def test_every_recipe_field_is_a_key() -> None:
    data = tomllib.loads(recipe_file.dumps(RecipeFile(model="m", recipe=Recipe())))
    assert data["schema"] == recipe_file.SCHEMA
    assert set(data["recipe"]) == {f.name for f in dataclasses.fields(Recipe)}
    assert data["job"] == {"model": "m"}
    assert "training" not in data


def test_training_is_written_where_it_is_not_as_usual() -> None:
    told = Training(learning_rate=1e-3, max_steps=7)
    text = recipe_file.dumps(RecipeFile(model="m", recipe=Recipe(), training=told))
    assert tomllib.loads(text)["training"] == {"learning_rate": 1e-3, "max_steps": 7}
    assert recipe_file.loads(HEAD + "[training]\nepochs = 3").training == Training(epochs=3.0)
    assert recipe_file.loads(HEAD + "[training]\nlearning_rate = 0.0\nmax_steps = -1").training == Training()


def test_left_out_keys_take_their_defaults() -> None:
    file = recipe_file.loads('schema = 1\n[job]\nmodel = "m"\n[recipe]\nmicro_batch = 3\n')
    assert file == RecipeFile(model="m", recipe=Recipe(micro_batch=3))


HEAD = 'schema = 1\n[job]\nmodel = "m"\n[recipe]\n'


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("", "no `schema`", "schema = 1"),
        ("schema = true", "no `schema`", "schema = 1"),
        ("schema = 1", "needs the key `model`", "model ="),
        ('schema = 1\n[job]\nmodel = "m"', "[recipe] table", "model ="),
        ("schema = 1\nrecipe = 3", "must be a table", "[recipe]"),
        (HEAD + "micro_batc = 2", "unknown key in recipe.toml 'micro_batc'", "micro_batch"),
        (HEAD + "[jobs]", "unknown table in recipe.toml 'jobs'", "did you mean job"),
        (HEAD + "colour = 2", "unknown key in recipe.toml 'colour'", "known: method, precision"),
        (HEAD + "[training]\nepoch = 2", "unknown key in recipe.toml 'epoch'", "did you mean epochs"),
        (HEAD + "[training]\nhue = 2", "unknown key", "known: learning_rate, epochs, max_steps, lr_scheduler"),
        (HEAD + "[house]", "unknown table in recipe.toml 'house'", "known: schema, job, recipe, training"),
        (HEAD + "[training]\nmax_steps = 2.5", "training.max_steps", "numbers bare"),
        (HEAD + "[training]\nmax_steps = true", "training.max_steps", "numbers bare"),
        (HEAD + '[training]\nlearning_rate = "2e-5"', "training.learning_rate", "numbers bare"),
        (HEAD + "[training]\nmax_steps = -3", "--max-steps must be from 1", "memfit train --help"),
        (HEAD + "[training]\nsave_steps = 0", "save_steps = 0", "save_strategy"),
        (HEAD + "[training]\nwarmup = -2", "`warmup` must be from 0", "usual"),
        (HEAD + "[training]\ncolumns = {fields = []}", "names no field", "fields ="),
        (HEAD + "[training]\nsave_steps = 1.5", "--save-steps", "--save-steps 0.1"),
        (HEAD + "[training]\nlearning_rate = nan", "--learning-rate must be", "memfit train --help"),
        (HEAD + "[training]\nepochs = 0", "--epochs must be", "memfit train --help"),
        ("schema = 1\ntraining = 3", "must be a table", "[training]"),
        (HEAD + 'micro_batch = "2"', "recipe.micro_batch", "numbers bare"),
        (HEAD + "micro_batch = 2.0", "recipe.micro_batch", "numbers bare"),
        (HEAD + "micro_batch = true", "recipe.micro_batch", "numbers bare"),
        (HEAD + "micro_batch = 0", "--micro-batch must be a whole number", "--micro-batch"),
        (HEAD + 'method = "loar"', "recipe.method", "full, lora, qlora"),
        (HEAD + 'lora_targets = "q_proj"', "recipe.lora_targets", "lists in []"),
        (HEAD + "lora_dropout = nan", "--lora-dropout", "0.05"),
        ("schema = 1\n[job]\nmodel = 7\n[recipe]", "job.model", "text in quotes"),
        ('schema = 1\n[job]\nmodel = "m"\nlongest_sample = -1\n[recipe]', "`longest_sample` must be", "leave it out"),
        ("a = [" * 5000, "not valid TOML", "memfit plan"),
        ("schema = ", "not valid TOML", "memfit plan"),
    ],
)  # fmt: skip
def test_refused_with_a_hint(text: str, said: str, hint: str) -> None:
    with pytest.raises(BadInput) as caught:
        recipe_file.loads(text)
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_a_newer_schema_is_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        recipe_file.loads("schema = 2")
    assert "upgrade" in caught.value.hint


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        recipe_file.loads(text)
    except BadInput as error:
        assert error.message and error.hint


def test_read_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(HEAD + "micro_batch = 0")
    with pytest.raises(BadInput, match=r"recipe\.toml"):
        recipe_file.read(path)
    path.write_text(HEAD)
    assert recipe_file.read(path).recipe == Recipe()


def test_read_refuses_what_is_no_small_text_file(tmp_path: Path) -> None:
    large, binary = tmp_path / "large", tmp_path / "binary"
    large.write_bytes(b"#" * (recipe_file.SIZE_LIMIT + 1))
    binary.write_bytes(b"\xff\xfe\x00schema")
    for path, said in (
        (large, "larger"),
        (binary, "not a text file"),
        (tmp_path, "not a file"),
        (tmp_path / "no", "no file"),
    ):
        with pytest.raises(BadInput, match=said):
            recipe_file.read(path)
