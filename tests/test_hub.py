"""Model resolution: names, folders, hostile files, the Hub's answers; every failure is our error with a hint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from hypothesis import given
from hypothesis import strategies as st

from memfit import catalogue
from memfit.catalogue import names
from memfit.errors import BadInput, MemfitError, UnknownName, Unsupported
from memfit.models import hub
from memfit.models.hub import check_there, list_models, resolve_config, resolve_model

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY_COUNT = 2 * (4 * 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64 + 2 * 100 * 64


def folder(path: Path, config: object = TINY) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    head = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()}
    raw = json.dumps({"__metadata__": {"format": "pt"}, **head}).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)


def tensors_of(path: Path) -> dict[str, tuple[str, list[int]]]:
    """What a checkpoint of that folder's model declares."""
    model = resolve_model(str(path))
    found = {w.name: ("BF16", list(w.shape)) for w in (*model.embedding, *model.final, *model.head)}
    for name, layer in zip(model.layer_names, model.layers, strict=True):
        found |= {f"{name}.{w.name}": ("BF16", list(w.shape)) for w in layer.weights}
    return found


# ---------------------------------------------------------------------------------------------------- the catalogue


@pytest.mark.parametrize(
    ("typed", "stem"),
    [
        ("llama-2-7b", "llama-2-7b"),
        ("Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/llama-2-7b-chat-hf", "llama-2-7b"),
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("llama_3.1_8b_instruct", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen2-7B", "qwen2.5-7b"),
        ("qwen-7b-chat", "qwen-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "llama-3.2-3b"),
        ("unsloth/qwen3-14b-unsloth-bnb-4bit", "qwen3-14b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("qwen3-8b-base", "qwen3-8b"),
        ("gpt2", "gpt2"),
        ("TinyLlama", "tinyllama-1.1b"),
        ("bert-base-uncased", "bert-base-uncased"),
    ],
)
def test_names_of_the_catalogue(typed: str, stem: str) -> None:
    model = resolve_model(typed)
    entry = names.find(typed)
    assert entry is not None and entry.stem == stem
    assert (model.name, model.parameters) == (typed if "/" in typed else entry.id, entry.parameters)


@pytest.mark.parametrize("entry", list_models(), ids=lambda entry: entry.stem)
def test_every_name_finds_its_own_entry(entry: catalogue.Entry) -> None:
    for name in entry.names:
        assert names.find(name) is entry
        assert names.find(name.upper()) is entry


def test_index_and_files_agree() -> None:
    files = {path.name for path in (Path(catalogue.__file__).parent / "models").iterdir()}
    assert files == {f"{entry.stem}.json" for entry in list_models()}
    assert all(entry.grade in "ABC" and entry.source for entry in list_models())


def test_one_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the file of the model asked for is opened."""
    read: list[str] = []
    monkeypatch.setattr(catalogue, "config", lambda entry: read.append(entry.stem) or TINY)
    resolve_model("qwen3-8b")
    assert read == ["qwen3-8b"]


def test_part_of_a_name() -> None:
    assert resolve_model("qwen3-next").name == "Qwen/Qwen3-Next-80B-A3B-Instruct"
    with pytest.raises(BadInput, match="2 models") as caught:
        resolve_model("llama-3.2")
    assert "llama-3.2-1b, llama-3.2-3b" in caught.value.hint


@pytest.mark.parametrize("typed", ["lama-2-7b", "qwen2.5-7c", "zzz", "7 b", "a" * 500])
def test_unknown_names(typed: str) -> None:
    with pytest.raises(UnknownName) as caught:
        resolve_model(typed)
    assert caught.value.hint


def test_suggestion() -> None:
    with pytest.raises(UnknownName) as caught:
        resolve_model("lama-2-7b")
    assert "llama-2-7b" in caught.value.hint


def test_someone_elses_repository_is_not_the_catalogue() -> None:
    assert names.find("someone/llama-2-7b") is None
    assert names.find("someone/Llama-2-7b-hf") is None


def test_refused_family_in_the_catalogue() -> None:
    with pytest.raises(Unsupported, match="diffusers"):
        resolve_model("sdxl")


@given(text=st.text(max_size=40))
def test_any_text_ends_in_an_architecture_or_our_error(text: str) -> None:
    if "/" in text or text.strip().startswith((".", "~")):
        return  # paths and repositories are tested below
    try:
        resolve_model(text)
    except MemfitError as error:
        assert error.hint


# ------------------------------------------------------------------------------------------------- folders and files


def test_folder_and_file(tmp_path: Path) -> None:
    path = folder(tmp_path / "mine")
    assert resolve_model(str(path)).parameters == TINY_COUNT
    assert resolve_model(str(path / "config.json")).parameters == TINY_COUNT


def test_folder_wins_over_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "gpt2")
    (tmp_path / "llama-2-7b").mkdir()  # an output folder without a config
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gpt2").parameters == TINY_COUNT
    assert resolve_model("llama-2-7b").parameters == 6_738_415_616


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 100_000, "\x00\x01", '{"model_type": "llama", "hidden_size": NaN}',
     '{"model_type": "llama", "hidden_size": 1e999}', '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}",
     '{"model_type": "llama"}', '{"model_type": "llama", "hidden_size": -64}', '{"text_config": {}}'],
    ids=range(12),
)  # fmt: skip
def test_hostile_configs(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        resolve_model(str(folder(tmp_path / "bad", text)))
    assert caught.value.hint


def test_config_has_a_size_limit(tmp_path: Path) -> None:
    path = folder(tmp_path / "large", json.dumps({**TINY, "padding": " " * hub.MAX_CONFIG}))
    with pytest.raises(BadInput, match="larger than 1 MiB"):
        resolve_model(str(path))


def test_config_that_is_a_folder_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    (tmp_path / "y.json").write_bytes(b"\xff\xfe\x00")
    for name in ("x.json", "y.json", "missing.json", "missing/"):
        with pytest.raises(BadInput) as caught:
            resolve_model(str(tmp_path / name))
        assert caught.value.hint


def test_empty_folder_and_adapter(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B"}))
    with pytest.raises(BadInput, match="adapter") as caught:
        resolve_model(str(tmp_path))
    assert "Qwen/Qwen3-8B" in caught.value.hint


# ------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoint_confirms_the_config(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    tensors = tensors_of(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", [8])  # a buffer of old checkpoints
    tensors["model.layers.2.mlp.up_proj.weight"] = ("BF16", [160, 64])  # multi-token prediction: not loaded
    half = len(tensors) // 2
    safetensors(path / "model-00001-of-00002.safetensors", dict(list(tensors.items())[:half]))
    safetensors(path / "model-00002-of-00002.safetensors", dict(list(tensors.items())[half:]))
    safetensors(path / "optimizer.safetensors", {"state": ("F32", [10**6])})
    assert resolve_model(str(path)).checkpoint_parameters == TINY_COUNT


def test_checkpoint_contradicts_the_config(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    tensors = tensors_of(path)
    tensors["model.unknown_tower.weight"] = ("BF16", [64, 1000])
    safetensors(path / "model.safetensors", tensors)
    with pytest.raises(Unsupported, match="describes") as caught:
        resolve_model(str(path))
    assert "guess" in caught.value.hint
    model = resolve_model(str(path), trust_config=True)
    assert (model.parameters, model.checkpoint_parameters) == (TINY_COUNT, TINY_COUNT + 64_000)


def test_quantised_checkpoint_is_not_counted(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    safetensors(path / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": ("U8", [5120, 1])})
    assert resolve_model(str(path)).checkpoint_parameters is None


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({"total_size": 2 * TINY_COUNT}, TINY_COUNT),
        ({"total_parameters": TINY_COUNT, "total_size": 1}, TINY_COUNT),
        ({}, None),
    ],
)
def test_index_of_shards_elsewhere(tmp_path: Path, metadata: dict[str, int], found: int | None) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
    assert resolve_model(str(path)).checkpoint_parameters == found


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x00" * 8, b"\xff" * 64, (5).to_bytes(8, "little") + b"[1,2]", (2).to_bytes(8, "little") + b"{",
     (23).to_bytes(8, "little") + b'{"a": {"dtype": "BF16"}}', (1 << 40).to_bytes(8, "little") + b"{}"],
    ids=range(7),
)  # fmt: skip
def test_damaged_headers(tmp_path: Path, raw: bytes) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").write_bytes(raw)
    with pytest.raises(BadInput, match="safetensors") as caught:
        resolve_model(str(path))
    assert caught.value.hint


# ----------------------------------------------------------------------------------------------------------- the Hub


class FakeHub:
    """Answers for huggingface_hub; the repository has one shard, with these tensors."""

    def __init__(self, total: int | None, tensors: dict[str, tuple[str, list[int]]]) -> None:
        self.total, self.tensors = total, tensors

    def __call__(self, token: str | None = None) -> FakeHub:
        return self

    def model_info(self, name: str, expand: list[str], timeout: float) -> SimpleNamespace:
        assert 0 < timeout < 10
        return SimpleNamespace(safetensors=None if self.total is None else SimpleNamespace(total=self.total))

    def get_safetensors_metadata(self, name: str) -> SimpleNamespace:
        tensors = {n: SimpleNamespace(dtype=dtype, shape=shape) for n, (dtype, shape) in self.tensors.items()}
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for org/name."""
    path = folder(tmp_path / "cached")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(path / "config.json"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return path


@pytest.mark.parametrize(("total", "found"), [(TINY_COUNT, TINY_COUNT), (None, None)])
def test_hub_model(on_hub: Path, monkeypatch: pytest.MonkeyPatch, total: int | None, found: int | None) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub(total, {}))
    model = resolve_model("org/name")
    assert (model.name, model.parameters, model.checkpoint_parameters) == ("org/name", TINY_COUNT, found)


def test_hub_summary_with_buffers_is_settled_by_the_headers(on_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(on_hub) | {"h.0.attn.bias": ("F32", [1, 1, 100, 1000])}
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub(TINY_COUNT + 100_000, tensors))
    assert resolve_model("org/name").checkpoint_parameters == TINY_COUNT


def test_hub_checkpoint_contradicts_the_config(on_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub(10**6, {"tower": ("F32", [1000, 1000])}))
    with pytest.raises(Unsupported):
        resolve_model("org/name")
    assert resolve_model("org/name", offline=True).checkpoint_parameters is None


def http_error(kind: type[Exception]) -> Exception:
    """One of the library's errors, without the response its constructor asks for."""
    error = kind.__new__(kind)
    Exception.__init__(error, "the answer\nand more")
    return error


@pytest.mark.parametrize(
    ("kind", "ours", "words"),
    [
        (errors.GatedRepoError, BadInput, "gated"),
        (errors.RepositoryNotFoundError, UnknownName, "unknown model"),
        (errors.LocalEntryNotFoundError, BadInput, "cannot be reached"),
        (errors.EntryNotFoundError, BadInput, "no config.json"),
        (errors.HfHubHTTPError, BadInput, "did not answer"),
        (errors.HFValidationError, BadInput, "did not answer"),
        (ConnectionError, BadInput, "did not answer"),
    ],
)
def test_hub_failures(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], ours: type[MemfitError], words: str
) -> None:
    def fail(*a: object, **k: object) -> str:
        raise http_error(kind)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ours, match=words) as caught:
        resolve_model("org/name")
    assert caught.value.hint


@pytest.mark.parametrize("what", ["model", "dataset"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.GatedRepoError, "gated"),
        (errors.RepositoryNotFoundError, "neither a path nor"),
        (ConnectionError, "cannot be reached"),
    ],
)
def test_what_training_cannot_download_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Exception], words: str, what: Any
) -> None:
    def fail(*a: object, **k: object) -> None:
        raise http_error(kind)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match=words) as caught:
        check_there("owner/typo", what)
    assert caught.value.hint
    file = tmp_path / f"{what}s--owner--typo" / "snapshots" / "1" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.touch()
    check_there("owner/typo", what)


def test_without_a_network_one_request_is_made_and_nothing_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def nobody(url: str, *, timeout: float, **_: object) -> None:
        asked.append((url, timeout))
        raise RuntimeError("Name or service not known")

    def never(*_: object, **__: object) -> str:
        raise AssertionError("a download retries")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", nobody)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", never)
    with pytest.raises(BadInput, match="cannot be reached") as caught:
        resolve_model("org/surely-not-cached")
    assert "config.json" in caught.value.hint and "did you mean" not in caught.value.hint
    assert len(asked) == 1
    with pytest.raises(BadInput, match="cannot be reached") as caught:
        resolve_model("Qwen/Qwen2.5-7BB")
    assert caught.value.hint.startswith("did you mean qwen/qwen2.5-7b or ")


def test_offline_without_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match="cannot be reached"):
        resolve_model("org/surely-not-cached", offline=True)


def test_light_imports() -> None:
    """A catalogued model needs neither torch nor transformers nor the Hub's client."""
    code = (
        "import sys; from memfit.models.hub import resolve_model; resolve_model('qwen3-8b');"
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["llama", "", "./nowhere", "no such model"])
def test_a_config_is_refused_as_its_model_is(name: str) -> None:
    with pytest.raises(MemfitError) as model:
        resolve_model(name)
    with pytest.raises(MemfitError) as config:
        resolve_config(name)
    assert (config.value.message, config.value.hint) == (model.value.message, model.value.hint)


def test_the_middle_of_a_name_is_no_name_of_its_own() -> None:
    with pytest.raises(BadInput, match=r"could be \d models") as caught:
        resolve_model("llama-8b")
    assert "llama-3.1-8b" in str(caught.value.hint)
    assert resolve_model("distill-llama-8b").name == "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
