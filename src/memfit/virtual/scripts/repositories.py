"""Models named by a traced script: folders with the right files, weights without data, perhaps a stand-in tokenizer."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit import catalogue
from memfit.catalogue import names
from memfit.errors import BadInput
from memfit.virtual.patching import patched
from memfit.virtual.supported import check_library

Note = Callable[[str], None]
CHARACTERS = 4  # per token of the stand-in; English text has 4 to 4.5 with vocabularies since 2023
# beginnings of the names of a tokenizer's files
_TOKENIZER = (
    "tokenizer", "special_tokens_map", "vocab", "merges", "chat_template", "spiece", "sentencepiece", "added_tokens"
)  # fmt: skip
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_STORED_QUANTISED = re.compile(r"(?i)(?<![a-z0-9])(gptq|awq|bnb|4bit|8bit|int4|int8|fp8|mxfp4|gguf)(?![a-z0-9])")
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '### ' + message['role'] + '\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)


class Repositories:
    """Folders that stand for models by name, each made once. `note` receives what is assumed."""

    def __init__(self, root: Path, note: Note) -> None:
        self._root, self._note = root, note
        self._folders: dict[str, str | None] = {}
        self.invented: set[str] = set()  # folders whose tokenizer is a stand-in

    def folder(self, name: Any) -> Any:
        """Return the folder to read in place of `name`. Raises BadInput for a model that is not available offline."""
        text = os.fspath(name)
        if text not in self._folders:
            self._folders[text] = None if Path(text).is_relative_to(self._root) else self._made(text)
        return self._folders[text] or name

    def _made(self, name: str) -> str | None:
        local = Path(name)
        if local.is_dir() and (any(p.name.endswith(_WEIGHTS) for p in local.iterdir()) or not _config_in(local)):
            return None
        config, source = (_config_in(local), local) if local.is_dir() else _found(name)
        if config is None:
            raise BadInput(
                f"{name[:80]} is neither a folder nor a model known without a network",
                hint="see 'memfit models', or give the script a folder with the model's config.json",
            )
        if "quantization_config" in config or _STORED_QUANTISED.search(name.rpartition("/")[2]):
            raise BadInput(
                f"{name[:80]} is stored quantised, which a trace cannot load",
                hint="name the original model, with quantization_config=BitsAndBytesConfig(...)",
            )
        folder = self._root / re.sub(r"[^\w.-]", "--", name.strip("/"))
        folder.mkdir(parents=True)
        self._fill(name, config, source, folder)
        return str(folder)

    def _fill(self, name: str, config: dict[str, Any], source: Path | None, folder: Path) -> None:
        import torch
        from transformers import AutoConfig

        from memfit.virtual.jobs.models import checkpoint

        text = json.dumps(config)
        (folder / "config.json").write_text(text)
        made = AutoConfig.from_pretrained(str(folder))
        checkpoint(made, made.dtype or torch.float32, folder)
        (folder / "config.json").write_text(text)
        kept = [p for p in source.iterdir() if p.name.startswith(_TOKENIZER)] if source else []
        for path in kept:
            shutil.copy(path, folder / path.name)
        self._note(f"weights of {name}: shapes only")
        if not kept:
            tokenizer(made.get_text_config().to_dict() | config | config.get("text_config", {}), folder)
            self.invented.add(str(folder))
            self._note(f"tokenizer of {name}: a stand-in, {CHARACTERS} characters per token")


def _config_in(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    return dict(json.loads(path.read_text("utf-8-sig"))) if path.is_file() else None


def _found(name: str) -> tuple[dict[str, Any] | None, Path | None]:
    """Return a model's config from the Hub's local cache or the catalogue, and the folder of its other files."""
    from huggingface_hub import try_to_load_from_cache

    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return _config_in(Path(cached).parent), Path(cached).parent
    entry = names.find(name)
    return (dict(catalogue.config(entry)), None) if entry else (None, None)


_PADDED = ("qwen", "gemma")  # families whose tokenizers have a pad token that configs do not name


def tokenizer(config: dict[str, Any], folder: Path) -> None:
    """Write a tokenizer with the model's vocabulary size that makes one token of every CHARACTERS characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    size = config["vocab_size"]
    words = {i: f"<{i}>" for i in range(size)}
    special = {"eos_token": words[size - 1]}  # every tokenizer has one; the config may name another
    for role in ("bos", "eos", "pad"):
        number = config.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) else number
        if isinstance(number, int) and 0 <= number < size:
            special[f"{role}_token"] = words[number]
    if config["model_type"].startswith(_PADDED):
        special.setdefault("pad_token", words[size - 1])
    unknown = words[next(i for i in words if words[i] not in special.values())]
    made = Tokenizer(models.WordLevel({word: i for i, word in words.items()}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{CHARACTERS}}}"), "isolated")
    made.add_special_tokens(sorted(set(special.values())))
    made.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unknown, "chat_template": _CHAT,
        "model_max_length": config.get("max_position_embeddings") or 1 << 20, **special,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


# --- where transformers looks for files ---


def changes(repositories: Repositories) -> dict[str, Callable[[ModuleType], Any]]:
    """Return changes to modules of transformers and PEFT, by module."""

    @contextmanager
    def files(module: ModuleType) -> Iterator[None]:
        real = module.cached_files

        def cached_files(path_or_repo_id: Any, filenames: Any, **words: Any) -> Any:
            return real(repositories.folder(path_or_repo_id), filenames, **words)

        with patched(module, {"cached_files": cached_files}):
            yield

    @contextmanager
    def tokenizers(module: ModuleType) -> Iterator[None]:
        base = module.PreTrainedTokenizerBase
        real = base.__dict__["from_pretrained"].__func__

        def from_pretrained(cls: Any, name: Any, *args: Any, **words: Any) -> Any:
            folder = repositories.folder(name)
            if folder in repositories.invented:  # the model's own tokenizer class would expect its own files
                cls = import_module("transformers").PreTrainedTokenizerFast
            return real(cls, folder, *args, **words)

        nothing = lambda self, *_, **__: ()  # noqa: E731
        with patched(base, {"from_pretrained": classmethod(from_pretrained), "save_pretrained": nothing}):
            yield

    def weights(module: ModuleType) -> Any:
        from memfit.virtual.jobs.models import HollowFile  # imports transformers, which is there now

        return patched(module, {"safe_open": HollowFile})

    def supported(module: ModuleType) -> Any:
        check_library(module.__name__, module.__version__)
        return nullcontext()

    # PEFT would ask the Hub whether the vocabulary has grown
    offline = {"check_file_exists_on_hf_hub": lambda *_, **__: False}
    return {
        "transformers": supported,
        "transformers.utils.hub": files,
        "transformers.tokenization_utils_base": tokenizers,
        "transformers.modeling_utils": weights,
        "peft.utils.save_and_load": lambda module: patched(module, offline),
    }
