"""How many processes a launcher starts, on how many nodes: by its arguments, its file, or its hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.virtual.scripts.launchers import Said

_DIGITS = 6  # of a number of processes, nodes or slots


def whole_number(text: str, what: str) -> int:
    """Read a number of processes or nodes. Raises BadInput that names `what`."""
    if not text.isdecimal() or len(text) > _DIGITS or not int(text):
        raise BadInput(f"{what}: '{text[:40]}' is not a number", hint="type the number itself")
    return int(text)


def _by_torchrun(said: Said, environment: Mapping[str, str], folder: str) -> dict[str, Any]:
    fewest, _, most = said.last("nodes", "1").partition(":")  # 1:4 starts as soon as one node is there
    each = said.last("processes", "1")
    return {
        "nodes": whole_number(fewest, "torchrun --nnodes"),
        "most_nodes": whole_number(most or fewest, "torchrun --nnodes"),
        "processes": 0 if each in ("gpu", "auto") else whole_number(each, "torchrun --nproc_per_node"),
    }  # fmt: skip


def _by_accelerate(said: Said, environment: Mapping[str, str], folder: str) -> dict[str, Any]:
    path = said.last("config") or _default_config(environment)
    written = _config(Path(folder, path), bool(said.last("config"))) if path else {}
    nodes = whole_number(said.last("nodes") or str(written.get("num_machines") or 1), "accelerate --num_machines")
    total = said.last("total") or str(written.get("num_processes") or 0)
    count = 0 if total == "0" else whole_number(total, "accelerate --num_processes")
    if count % nodes:
        raise BadInput(f"accelerate: {count} processes on {nodes} machines", hint=f"--num_processes {nodes * 8}")
    shown = said.last("devices") or str(written.get("gpu_ids") or "all")
    return {
        "nodes": nodes, "processes": count // nodes, "settings": tuple(said.own),
        **({} if shown == "all" else {"devices": len(shown.split(","))}),
    }  # fmt: skip


def _default_config(environment: Mapping[str, str]) -> str:
    """Return the file that `accelerate config` wrote, if there is one (accelerate/commands/config/config_args.py)."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache")
    path = Path(environment.get("HF_HOME") or cache / "huggingface") / "accelerate" / "default_config.yaml"
    return str(path) if path.is_file() else ""


def _config(path: Path, named: bool) -> dict[str, Any]:
    from memfit.documents.recipe_file import read_text  # needs memfit's own dependencies, which an environment may lack
    from memfit.reading.settings_text import parsed

    if not path.is_file():
        raise BadInput(f"{path} does not exist", hint="accelerate config writes one")
    found = parsed(read_text(path), str(path))
    if not isinstance(found, dict):
        raise BadInput(f"{path}: accelerate cannot read it", hint="see: accelerate config")
    return found


def _by_deepspeed(said: Said, environment: Mapping[str, str], folder: str) -> dict[str, Any]:
    pool = _hosts(Path(folder, said.last("hostfile", "/job/hostfile")))
    include, exclude = said.last("include"), said.last("exclude")
    if include:
        pool = _slots(include, pool)
    elif exclude:
        if not pool:
            raise BadInput("deepspeed --exclude without a hostfile", hint="--include localhost:0,1,2,3")
        pool = {
            host: [s for s in slots if s not in _slots(exclude, pool).get(host, [])] for host, slots in pool.items()
        }
    elif shown := environment.get("CUDA_VISIBLE_DEVICES"):
        pool = pool or {"localhost": shown.split(",")}
    nodes = whole_number(said.last("nodes") or str(len(pool) or 1), "deepspeed --num_nodes")
    if said.last("processes"):
        each = whole_number(said.last("processes"), "deepspeed --num_gpus")
    else:
        counts = {len(slots) for slots in list(pool.values())[:nodes]} or {0}
        if len(counts) > 1:
            raise BadInput("deepspeed: the hosts have unequal numbers of cards", hint="--num_gpus 8")
        each = counts.pop()
    return {"nodes": nodes, "processes": each}


def _hosts(path: Path) -> dict[str, list[str]]:
    """Return the slots of each host of a hostfile ("worker-0 slots=4")."""
    from memfit.documents.recipe_file import read_text

    if not path.is_file():
        return {}
    rows = (re.match(r"\s*+([^\s#]++)\s++slots=(\d{1,5})\b", line) for line in read_text(path).splitlines())
    return {row[1]: [str(n) for n in range(int(row[2]))] for row in rows if row}


def _slots(text: str, pool: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the slots that --include or --exclude names: "worker-0@worker-1:0,2"."""
    found = {}
    for one in text.split("@"):
        host, colon, slots = one.partition(":")
        found[host] = slots.split(",") if colon else list(pool.get(host, []))
    return found


# launcher -> the fields of a CommandLine that its arguments give, in an environment and a folder
COUNTED: dict[str, Callable[[Said, Mapping[str, str], str], dict[str, Any]]] = {
    "torchrun": _by_torchrun,
    "accelerate": _by_accelerate,
    "deepspeed": _by_deepspeed,
}
