"""Models named by a traced script: folders with the right files, weights without data, perhaps a stand-in tokenizer."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit import catalogue
from memfit.catalogue import names
from memfit.errors import BadInput, Unsupported
from memfit.virtual.patching import patched
from memfit.virtual.scripts.stand_ins import (
    CHARACTERS,
    builder,
    generation_settings,
    pipeline,
    processors,
    tokenizer,
    tokenizer_class,
)
from memfit.virtual.supported import OLDEST_FOR_STAND_INS, check_library

Note = Callable[[str], None]
# beginnings of the names of a tokenizer's files, and of those of processors
_TOKENIZER = (
    "tokenizer", "special_tokens_map", "vocab", "merges", "chat_template", "spiece", "sentencepiece", "added_tokens"
)  # fmt: skip
_PROCESSORS = ("preprocessor_config", "processor_config", "video_preprocessor_config", "generation_config")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_OWN = (*_WEIGHTS, "model_index.json")  # in a folder that is read as it is, of a model or of a pipeline of diffusers
_STORED_QUANTISED = re.compile(r"(?i)(?<![a-z0-9])(gptq|awq|bnb|4bit|8bit|int4|int8|fp8|mxfp4|gguf)(?![a-z0-9])")


class Repositories:
    """Folders that stand for models by name, each made once. `note` receives what is assumed."""

    def __init__(self, root: Path, note: Note) -> None:
        self._root, self._note = root, note
        self._folders: dict[str, str | None] = {}
        self._unweighted: dict[str, str] = {}  # folder without a checkpoint as yet -> the model's name
        self._unsaid: dict[str, str] = {}  # folder -> the note on its processors, until they are read
        self.invented: dict[str, str] = {}  # folder whose tokenizer is a stand-in -> the note on it

    def folder(self, name: Any) -> Any:
        """Return the folder to read in place of `name`. Raises BadInput for a model that is not available offline."""
        text = os.fspath(name)
        if text not in self._folders:
            self._folders[text] = None if Path(text).is_relative_to(self._root) else self._made(text)
        return self._folders[text] or name

    def known(self, name: Any) -> Any:
        """Return the folder that was made for `name`; `name` itself if there is none."""
        return self._folders.get(os.fspath(name)) or name

    def _made(self, name: str) -> str | None:
        local = Path(name)
        if local.is_dir() and (any(p.name.endswith(_OWN) for p in local.iterdir()) or not _config_in(local)):
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
        folder.mkdir(parents=True, exist_ok=True)
        self._fill(name, config, source, folder)
        return str(folder)

    def _fill(self, name: str, config: dict[str, Any], source: Path | None, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        kept = [p for p in source.iterdir() if p.name.startswith((*_TOKENIZER, *_PROCESSORS))] if source else []
        for path in kept:
            shutil.copy(path, folder / path.name)
        if "model_type" not in config:
            return
        if config["model_type"] == "diffusers":
            pipeline(config, folder)
            self.invented[str(folder)] = f"{name}: stand-ins, with tokenizers of {CHARACTERS} characters per token"
            return
        import transformers

        check_library("transformers", transformers.__version__, OLDEST_FOR_STAND_INS)
        text = config.get("text_config") or {}
        made = self._config(name, folder)
        whole = made.to_dict() | made.get_text_config().to_dict() | config | text | {"model_type": made.model_type}
        if not any(p.name.startswith(_TOKENIZER) for p in kept) and whole.get("vocab_size"):
            tokenizer(whole, folder)
            self.invented[str(folder)] = f"tokenizer of {name}: a stand-in, {CHARACTERS} characters per token"
        if not (folder / "preprocessor_config.json").is_file() and (made := processors(config, folder)):
            self._unsaid[str(folder)] = f"{made} of {name}: a stand-in, with sizes from the model's config"
        if generation := generation_settings(whole):
            (folder / "generation_config.json").write_text(json.dumps(generation))
        self._unweighted[str(folder)] = name

    def read(self, folder: str, names: Sequence[str]) -> None:
        """Prepare files that are about to be read: write the checkpoint, note which are stand-ins."""
        if any(name.endswith(_WEIGHTS) for name in names):
            self._write_weights(folder)
        if folder in self._unsaid and any(name.startswith(_PROCESSORS) for name in names):
            self._note(self._unsaid.pop(folder))

    def tokenizer_read(self, folder: str) -> bool:
        """Return whether a folder's tokenizer is a stand-in, which is noted."""
        if folder in self.invented:
            self._note(self.invented[folder])
        return folder in self.invented

    def _write_weights(self, folder: str) -> None:
        name = self._unweighted.pop(folder, None)
        if name is None:
            return
        import torch

        from memfit.virtual.jobs.models import checkpoint

        text = (Path(folder) / "config.json").read_text()
        made = self._config(name, Path(folder))
        checkpoint(made, made.dtype or torch.float32, Path(folder), builder(made))
        (Path(folder) / "config.json").write_text(text)
        self._note(f"weights of {name}: shapes only")

    @staticmethod
    def _config(name: str, folder: Path) -> Any:
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = json.loads((folder / "config.json").read_text())["model_type"]
        if kind not in CONFIG_MAPPING:
            raise Unsupported(
                f"{name[:80]} brings code of its own ({kind}), which neither this transformers nor a trace has",
                hint="give the script a folder with the model's config.json and code; 'memfit plan' needs neither",
            )
        return AutoConfig.from_pretrained(str(folder))


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


# --- where transformers looks for files ---


_ASKED = ("resolve_revision", "list_repo_tree", "list_repo_files", "model_info", "snapshot_download")


def _unconnected(repositories: Repositories) -> Any:
    """Return transformers' client of the Hub, which answers as without a network for models that have a stand-in."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    def method(name: str) -> Any:
        real = getattr(HfApi, name, None)
        refusal = LocalEntryNotFoundError if name == "snapshot_download" else OfflineModeIsEnabled

        def ask(self: Any, repo_id: str, *args: Any, **words: Any) -> Any:
            if repositories.folder(repo_id) != repo_id:
                raise refusal(f"{repo_id} is read from a stand-in")
            return real(self, repo_id, *args, **words) if real else None

        return ask

    return type("UnconnectedApi", (HfApi,), {name: method(name) for name in _ASKED})()


def changes(repositories: Repositories) -> dict[str, Callable[[ModuleType], Any]]:
    """Return changes to modules of transformers, PEFT and diffusers, by module."""

    @contextmanager
    def files(module: ModuleType) -> Iterator[None]:
        name = "cached_files" if hasattr(module, "cached_files") else "cached_file"  # one by one before 4.50
        real = getattr(module, name)

        def cached(path_or_repo_id: Any, filenames: Any, **words: Any) -> Any:
            folder = repositories.folder(path_or_repo_id)
            repositories.read(folder, [filenames] if isinstance(filenames, str) else filenames)
            return real(folder, filenames, **words)

        api = {"_hf_api": _unconnected(repositories)} if hasattr(module, "_hf_api") else {}
        with patched(module, {name: cached, **api}):
            yield

    @contextmanager
    def tokenizers(module: ModuleType) -> Iterator[None]:
        base = module.PreTrainedTokenizerBase
        real = base.__dict__["from_pretrained"].__func__

        def from_pretrained(cls: Any, name: Any, *args: Any, **words: Any) -> Any:
            folder = repositories.folder(name)
            invented = repositories.tokenizer_read(folder)
            made = real(tokenizer_class(cls) if invented else cls, folder, *args, **words)
            if folder != name:  # scripts name files of their own by it, in which ranks have to agree
                made.name_or_path = made.init_kwargs["name_or_path"] = os.fspath(name)
            if invented:  # save_vocabulary() copies that file
                made.vocab_file = getattr(made, "vocab_file", None) or str(Path(folder) / "tokenizer.json")
            return made

        save = base.save_pretrained

        def save_pretrained(self: Any, folder: Any, *args: Any, **words: Any) -> Any:
            if note := repositories.invented.get(str(repositories.known(self.name_or_path))):
                repositories.invented[os.fspath(folder)] = note
            return save(self, folder, *args, **words)

        with patched(base, {"from_pretrained": classmethod(from_pretrained), "save_pretrained": save_pretrained}):
            yield

    def weights(module: ModuleType) -> Any:
        from memfit.virtual.jobs.models import HollowFile  # imports transformers, which is there now

        return patched(module, {"safe_open": HollowFile})

    def pipelines(base: str) -> Callable[[ModuleType], Any]:
        def change(module: ModuleType) -> Any:
            kind = getattr(module, base)
            real = kind.__dict__["from_pretrained"].__func__

            def from_pretrained(cls: Any, name: Any, *args: Any, **words: Any) -> Any:
                return real(cls, repositories.folder(name), *args, **words)

            return patched(kind, {"from_pretrained": classmethod(from_pretrained)})

        return change

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
        "diffusers.models.modeling_utils": pipelines("ModelMixin"),
        "diffusers.schedulers.scheduling_utils": pipelines("SchedulerMixin"),
    }
