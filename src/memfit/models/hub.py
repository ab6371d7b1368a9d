"""Resolve a path, a name of the catalogue or a Hugging Face id to an Architecture; weights are never read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from memfit import catalogue
from memfit.catalogue import Entry, names
from memfit.errors import TRACE_HINT, BadInput, UnknownName, Unsupported, suggested
from memfit.models import safetensors
from memfit.models.families import architecture, without_formula
from memfit.nouns.architecture import Architecture
from memfit.reading import bounds

MAX_CONFIG = 1 << 20  # bytes; published files take up to 0.2 MiB (long label lists)
MAX_INDEX = 64 << 20  # the weight map of a model with many experts takes some MiB
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REACH_SECONDS = 5.0  # timeout of the connection, and of the answer
NOT_REACHED = "it is not in the catalogue or the cache; go online once, or give the path of its config.json"
# files in the Hub's cache that prove a download; a model's config.json alone may come from a plan
DOWNLOADED = {"model": ("snapshots/*/*.safetensors", "snapshots/*/*.bin"), "dataset": ("snapshots/*",)}
MISTYPED = 0.9  # similarity to a name of the catalogue from which a name counts as mistyped
_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def list_models() -> tuple[Entry, ...]:
    """Return the models of the catalogue, by name."""
    return catalogue.entries()


def resolve_model(
    text: str, *, offline: bool | None = None, token: str | None = None, trust_config: bool = False
) -> Architecture:
    """Resolve `text`: a folder or config.json, else the catalogue by name or unambiguous part, else the Hub.

    `offline`: use only the Hub's local cache (as HF_HUB_OFFLINE does). `trust_config`: accept a config.json whose
    parameter count differs by over 2 % from the checkpoint's; `checkpoint_parameters` then differs from `parameters`.
    Raises UnknownName, BadInput (unreadable or wrong values) or Unsupported (a family without a formula).
    """
    name, source = _found(text)
    if isinstance(source, Path):
        return _local(source, name, trust_config)
    if isinstance(source, Entry):
        # keep the name of a repository (a variant of the same shape); replace a short name by the catalogue's id
        return architecture(catalogue.config(source), name if "/" in name else source.id)
    return _from_hub(name, offline, token, trust_config)


def resolve_any(text: str) -> Architecture:
    """Resolve a model as `resolve_model` does; one without a formula is named and has no weights.

    Raises UnknownName or BadInput.
    """
    try:
        return resolve_model(text)
    except Unsupported:
        config = resolve_config(text)
        if not isinstance(config.get("model_type"), str):
            raise
        return without_formula(config, text.strip())


def resolve_config(text: str) -> dict[str, Any]:
    """Return the config.json of the model that `resolve_model` finds for `text`."""
    name, source = _found(text)
    if isinstance(source, Path):
        return read_json(source / "config.json" if source.is_dir() else source, MAX_CONFIG)
    if isinstance(source, Entry):
        return dict(catalogue.config(source))
    return read_json(_download_config(name), MAX_CONFIG)


def _found(text: str) -> tuple[str, Path | Entry | None]:
    """Return the stripped name and its source: a folder or file, an entry of the catalogue, or None for the Hub."""
    name = text.strip()
    if not name or len(name) > 1024 or "\0" in name:
        raise BadInput("no model given", hint="name one, such as meta-llama/Llama-3.1-8B, or see 'memfit models'")
    path = _path_of(name)
    if path and (name.endswith(".json") or (path / "config.json").exists()):
        return name, path
    entry = names.find(name)
    if entry is not None:
        return name, entry
    if path and path.is_dir():
        raise _no_config(path)
    if name.startswith((".", "/", "~")) or name.endswith((".json", "/")):
        raise BadInput(f"{name[:80]} does not exist", hint="give a folder with a config.json, or its path")
    return name, None if _REPOSITORY.fullmatch(name) else _by_part(name)


def _path_of(name: str) -> Path | None:
    """Return `name` as a path; None when no file can have that name (too long, an unknown user's home)."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError):
        return None
    return path


def _by_part(name: str) -> Entry:
    found = names.parts(name)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnknownName("model", name, names.known(), hint="see 'memfit models', or give org/name or a config.json")
    shown = ", ".join(entry.stem for entry in found[:8]) + (", ..." if len(found) > 8 else "")
    raise BadInput(f"'{name}' could be {len(found)} models", hint=f"choose one of {shown}")


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes. Raises BadInput for anything else."""
    try:
        raw = bounds.content_of(path, limit, "give a folder with a config.json, or its path")
        values = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid JSON", hint=str(error)[:200]) from error
    if not isinstance(values, dict):
        raise BadInput(f"{path} holds no JSON object", hint="a config.json starts with '{'")
    return values


def _local(path: Path, name: str, trust_config: bool) -> Architecture:
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, MAX_CONFIG)
    model = architecture(config, name)
    if not path.is_dir():
        return model
    shapes = safetensors.shapes_in(path)
    if shapes is not None:
        return _checked(model, safetensors.count(shapes, model), f"the safetensors files in {path}", trust_config)
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return model
    width = _DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")))
    return _checked(model, safetensors.total_of_index(read_json(index, MAX_INDEX), width), str(index), trust_config)


def _checked(model: Architecture, found: int | None, where: str, trust_config: bool) -> Architecture:
    if found is not None and not trust_config and not safetensors.agrees(found, model):
        raise safetensors.refuse(found, model, where)
    return replace(model, checkpoint_parameters=found)


def _no_config(path: Path) -> BadInput:
    """Return the error for a folder without config.json, which for a PEFT adapter names the base model."""
    adapter = path / "adapter_config.json"
    base = read_json(adapter, MAX_CONFIG).get("base_model_name_or_path") if adapter.is_file() else None
    if isinstance(base, str):
        return BadInput(f"{path} holds an adapter, not a model", hint=f"name its base model: {base}")
    return BadInput(f"{path} has no config.json", hint=f"give the folder of a transformers model; {TRACE_HINT}")


def _from_hub(name: str, offline: bool | None, token: str | None, trust_config: bool) -> Architecture:
    """Read config.json from the Hub or its cache, and check it against the Hub's parameter count, if there is one."""
    from huggingface_hub import constants

    file = _download_config(name, offline, token)
    model = architecture(read_json(file, MAX_CONFIG), name)
    if offline or constants.HF_HUB_OFFLINE:
        return model
    return _checked(model, _count_on_hub(name, token, model), "its repository", trust_config)


def _download_config(name: str, offline: bool | None = None, token: str | None = None) -> Path:
    from huggingface_hub import errors, hf_hub_download

    try:
        if not offline and not _cached(name):
            _reach(name, token)
        with _quiet():
            return Path(hf_hub_download(name, "config.json", token=token, local_files_only=bool(offline)))
    except errors.GatedRepoError as error:
        hint = f"accept its licence at https://huggingface.co/{name}, then 'hf auth login' (or set HF_TOKEN)"
        raise BadInput(f"{name} is gated", hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = "private models need a token: 'hf auth login'"
        raise UnknownName("model", name, names.known(), hint=hint) from error
    except errors.LocalEntryNotFoundError as error:
        raise _not_reached(name) from error
    except errors.EntryNotFoundError as error:
        hint = f"is it an adapter or a GGUF file? name the base model instead; {TRACE_HINT}"
        raise BadInput(f"{name} has no config.json", hint=hint) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        problem = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise BadInput(f"{name}: the Hub did not answer", hint=problem) from error


def _cached(name: str) -> bool:
    """Return whether the Hub's local cache holds any version of the config."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _not_reached(name: str) -> BadInput:
    hint = suggested(name, names.known(), NOT_REACHED, cutoff=MISTYPED)
    return BadInput(f"{name}: the Hub cannot be reached", hint=hint)


def _reach(name: str, token: str | None) -> None:
    """Make one short request without retries, because without a network a download retries for half a minute."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), token=token, timeout=REACH_SECONDS)
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.EntryNotFoundError):
        raise
    except Exception as error:  # every HTTP library has its own error for a host that does not answer
        raise _not_reached(name) from error


def check_there(name: str, kind: Literal["model", "dataset"]) -> None:
    """Raise BadInput if the repository was never downloaded, and the Hub has none of that name or cannot be reached."""
    from huggingface_hub import HfApi, constants, errors

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    if constants.HF_HUB_OFFLINE or any(found for pattern in DOWNLOADED[kind] for found in folder.glob(pattern)):
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=REACH_SECONDS)
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{'datasets/' * (kind == 'dataset')}{name}"
        raise BadInput(f"{name} is gated", hint=f"accept its licence at {page}, then 'hf auth login'") from error
    except errors.RepositoryNotFoundError as error:
        hint = f"give a path that is there, or a {kind} on the Hub: owner/name; private ones need 'hf auth login'"
        raise BadInput(f"{name} is neither a path nor a {kind} on the Hub", hint=hint) from error
    except Exception as error:  # every HTTP library has its own error for a host that does not answer
        hint = "go online once, or give the path of a downloaded one"
        raise BadInput(f"the {kind} {name} is not downloaded, and the Hub cannot be reached", hint=hint) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of huggingface_hub, whose errors become errors of memfit."""
    import logging  # here, because most commands ask the Hub for nothing

    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _count_on_hub(name: str, token: str | None, model: Architecture) -> int | None:
    """Return the repository's parameter count: its summary, or the sum of all headers if the summary disagrees."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        summary = api.model_info(name, expand=["safetensors"], timeout=REACH_SECONDS).safetensors
        if summary is None:
            return None
        if safetensors.agrees(summary.total, model):
            return summary.total
        headers = api.get_safetensors_metadata(name).files_metadata.values()
        shapes = {n: (str(t.dtype), tuple(t.shape)) for file in headers for n, t in file.tensors.items()}
        return safetensors.count(shapes, model)
    except Exception:  # no network, no safetensors, a broken header: use the config alone
        return None
