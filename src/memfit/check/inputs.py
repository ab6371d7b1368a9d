"""What an answer depends on, and whether all of it is still the same: then the answer is kept.

A trace records what it read (`virtual.process.recorded_inputs`). Files of the repository and files elsewhere that are
no installed code are compared by content; installed code by the names and versions of its distributions; variables by
their values. What is named in a command or a configuration counts as well, since libraries in C++ or Rust open files
that Python does not see.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from memfit.nouns.check import CheckJob

LARGE = 64 << 20  # bytes above which size and time of a file stand for its content
MOST = 512  # files of a folder that is named; of a larger one the first by name
# variables that change what libraries allocate, read or start
PREFIXES = (
    "PYTORCH_", "TORCH", "CUDA_", "NCCL_", "HF_", "TRANSFORMERS_", "ACCELERATE_", "FSDP_", "DEEPSPEED_", "DS_", "TRL_",
    "AXOLOTL_", "LLAMAFACTORY_", "UNSLOTH_", "BNB_", "NVTE_", "TRITON_", "SLURM_", "OMPI_", "PYTHON", "VIRTUAL_ENV",
    "UV_PROJECT", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_", "FORCE_TORCHRUN",
)  # fmt: skip
_LEFT_OUT = re.compile(r"TOKEN|PYTHONDONTWRITEBYTECODE|PYTHONUNBUFFERED|PYTHONHASHSEED|PYTHON_HISTORY")
_ASKED = re.compile(r"""(?:environ(?:\.get|\.setdefault)?|getenv)\s*[\[(]\s*["']([A-Za-z_]\w*)["']""")
_NATIVE = (".safetensors", ".bin", ".arrow", ".parquet", ".gguf", ".model", "tokenizer.json")
_SETTINGS = (".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".sh", ".slurm")
_WORD = re.compile(r"[^\s\"'=,:\[\]{}()]+")


class FileState(msgspec.Struct, frozen=True):
    """A file's content. digest: "" for a large one, which is the same as long as size and time are."""

    size: int
    time: int
    digest: str


class Inputs(msgspec.Struct, frozen=True):
    """Everything that an answer depends on beside the job itself. Paths are relative to the repository, or absolute.

    missing: paths that were looked for. folders: folder -> digest of the names in it, where they were listed. hidden:
    folder where modules were looked for -> modules of that name that are installed elsewhere (a new file there would
    come first). installed: folder -> digest of its distributions. variables: names beside those of PREFIXES.
    """

    files: dict[str, FileState]
    missing: tuple[str, ...]
    folders: dict[str, str]
    hidden: dict[str, tuple[str, ...]]
    modules: tuple[str, ...]
    installed: dict[str, str]
    variables: tuple[str, ...]
    environment: str  # digest of the variables' values

    @property
    def own(self) -> tuple[str, ...]:
        """Return the files of the repository."""
        return tuple(path for path in self.files if not os.path.isabs(path))  # noqa: PTH117


def gathered(records: Path, job: CheckJob, root: Path, folder: Path, environment: Mapping[str, str]) -> Inputs:
    """Return what the processes of a trace recorded in a folder. folder: the job's own."""
    real = Path(os.path.realpath(root))
    said: list[dict[str, Any]] = [json.loads(file.read_text()) for file in sorted(records.glob("*.json"))]

    def all_of(key: str) -> list[str]:
        return list(dict.fromkeys(path for one in said for path in one[key]))

    files = dict.fromkeys(all_of("files"))
    settings = [f for f in files if f.endswith(_SETTINGS)]
    for path in (*_named(" ".join((*job.command, job.config, job.model)), folder), *_named_in(settings, folder)):
        files.setdefault(os.path.realpath(path))
    for place in {os.path.dirname(f) for f in files if not f.endswith(".py")}:  # noqa: PTH120
        files |= dict.fromkeys(os.path.realpath(f) for f in _listing(place) if f.endswith(_NATIVE))
    states = {_told(path, real): state for path in files if (state := _state(Path(path))) is not None}
    texts = (Path(path).read_text(errors="replace") for path in files if path.endswith(".py") and Path(path).is_file())
    variables = tuple(sorted({name for text in texts for name in _ASKED.findall(text)}))
    modules = tuple(all_of("names"))
    return Inputs(
        states,
        tuple(_told(path, real) for path in all_of("missing") if path not in files),
        {_told(path, real): _names(path) for path in all_of("folders")},
        {_told(path, real): _hiding(path, modules) for path in all_of("searched")},
        modules,
        {path: _distributions(path) for path in all_of("installed")},
        variables,
        _values(environment, variables),
    )


def same(inputs: Inputs, root: Path, environment: Mapping[str, str]) -> bool:
    """Return whether nothing that an answer depends on has changed in a tree of the repository."""
    real = Path(os.path.realpath(root))
    return (
        inputs.environment == _values(environment, inputs.variables)
        and all(_unchanged(real / path, state) for path, state in inputs.files.items())
        and not any(os.path.lexists(real / path) for path in inputs.missing)
        and all(_names(str(real / path)) == digest for path, digest in inputs.folders.items())
        and all(_hiding(str(real / path), inputs.modules) == found for path, found in inputs.hidden.items())
        and all(_distributions(path) == digest for path, digest in inputs.installed.items())
    )


def _told(path: str, root: Path) -> str:
    return os.path.relpath(path, root) if path.startswith(f"{root}{os.sep}") else path


def _state(path: Path) -> FileState | None:
    try:
        stat = path.stat()
        digest = "" if stat.st_size > LARGE else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
    return FileState(stat.st_size, stat.st_mtime_ns, digest)


def _unchanged(path: Path, state: FileState) -> bool:
    try:
        stat = path.stat()
        if stat.st_size != state.size:
            return False
        if stat.st_mtime_ns == state.time or not state.digest:
            return stat.st_mtime_ns == state.time
        return hashlib.sha256(path.read_bytes()).hexdigest() == state.digest
    except OSError:
        return False


def _listing(place: str) -> list[str]:
    try:
        return [os.path.join(place, name) for name in sorted(os.listdir(place))[:MOST]]  # noqa: PTH118, PTH208
    except OSError:
        return []


def _names(place: str) -> str:
    return _digest(sorted(name for name in map(os.path.basename, _listing(place)) if name != "__pycache__"))


def _hiding(place: str, modules: Iterable[str]) -> tuple[str, ...]:
    """Return which of these modules a folder has as well."""
    try:
        found = {name.partition(".")[0] for name in os.listdir(place)}  # noqa: PTH208
    except OSError:
        return ()
    return tuple(sorted(found.intersection(modules)))


def _distributions(place: str) -> str:
    """Return the digest of the distributions in a folder; their folders are named by name and version."""
    try:
        return _digest(sorted(n for n in os.listdir(place) if n.endswith((".dist-info", ".egg-info", ".pth"))))  # noqa: PTH208
    except OSError:
        return ""


def _values(environment: Mapping[str, str], names: Iterable[str]) -> str:
    known = {name for name in environment if name.startswith(PREFIXES)} | set(names)
    return _digest(sorted((n, environment.get(n)) for n in known if not _LEFT_OUT.search(n)))


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()


def _named(text: str, folder: Path) -> Iterator[str]:
    """Yield the files that words of a text name, and those in folders that they name."""
    for word in dict.fromkeys(_WORD.findall(text)):
        if len(word) > 300 or ("/" not in word and "." not in word) or word.strip("./") == "":
            continue
        path = folder / Path(word)
        try:
            if path.is_file():
                yield str(path)
            elif path.is_dir() and not any(part == ".." for part in path.parts):
                yield from (file for file in _listing(str(path)) if Path(file).is_file())
        except OSError:
            continue


def _named_in(settings: Iterable[str], folder: Path) -> Iterator[str]:
    for name in settings:
        path = Path(name)
        if path.is_file() and path.stat().st_size < 1 << 18:
            text = path.read_text(errors="replace")
            yield from _named(text, folder)
            yield from _named(text, path.parent)
