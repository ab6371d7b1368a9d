"""Find a Gpu by its name in gpus.toml, by its memory, or in this machine."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit.errors import BadInput, UnknownName
from memfit.nouns.gpu import Gpu
from memfit.units import GB, GIB, MIB, human, several

if TYPE_CHECKING:
    from memfit.nouns.job import RecipeFile

TABLE = Path(__file__).parent / "gpus.toml"
SEE_ALL = "'memfit gpus' lists them; for another card give its memory: --gpu-memory 40GiB"
MAX_COUNT = 1 << 16
UNKNOWN_CONTEXT = 500 * MIB  # as in gpus.toml for cards of which no value is published
CUSTOM = "custom"  # the short name of a card of which only the memory is known
SAME_CARD = 0.08  # a measured total that differs by a larger share means another card of the same name
SMI_TIMEOUT = 10  # seconds; a hung driver must not hang the plan
MAX_NAME = 100  # characters; no card's name is longer

_COUNT = (
    re.compile(r"\A(?P<count>\d+)\s*[x×*]\s*(?P<name>\D.*|\d{2,}.*)"),
    re.compile(r"\A(?P<name>\S.*?)(?<=\S)\s*:\s*(?P<count>\d+)"),
)
_MAKERS = re.compile("nvidia|amd|intel|apple|geforce|tesla|quadro|radeon|instinct|gpu|generation|mac|macbook|mps|metal")
_MACS = re.compile(r"\b(mac|macbook)[ -](pro|air|studio|mini)\b")  # computers, whose 'pro' is not the chip's
_CALLED = {"Apple": "mac macbook mps metal", "AMD": "rocm hip", "Intel": "xpu", "NVIDIA": "cuda"}  # words for a vendor
MOST_LISTED = 24  # names in a hint; for more it tells how to list them
_FORM = re.compile(r"\d+gb|sxm\d?|pcie|nvl|hbm\d")  # words that distinguish cards of one model


@cache
def list_gpus() -> tuple[Gpu, ...]:
    """Return every row of gpus.toml, in its order."""
    table = _table()["gpu"]
    rows: list[dict[str, Any]] = [{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in table]
    return tuple(Gpu(**row) for row in rows)


def prices_read() -> str:
    """Return the day on which the prices of the table were read: "2026-11-21"."""
    return str(_table()["prices_read"])


@cache
def _table() -> dict[str, Any]:
    import tomllib  # here, because most commands that import this module never read the table

    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def find_gpu(text: str) -> Gpu:
    """Return the card called `text`; case, spaces and dashes do not matter.

    Accepts a short name, an alias, a full name, what nvidia-smi prints, or a part that only one card has ("ti super").
    Raises UnknownName with similar names, or BadInput with the candidates when several cards match ("a100").
    """
    text = text.strip()[:MAX_NAME]
    words = _words(text)
    if exact := _by_name().get("".join(words)):
        return exact
    found = _having(words) or described(text)
    if len(found) == 1:
        return found[0]
    raise BadInput(f"'{text}' could be {len(found)} GPUs", hint=_choice(text, found))


def described(text: str) -> list[Gpu]:
    """Return the card called `text`, else the cards that each of its words describes: 'apple 64gb', 'ada', 'rtx 24gb'.

    A word may be part of the name, the vendor, the architecture or the memory. Raises UnknownName if no card has all.
    """
    text = text.strip()[:MAX_NAME]
    if exact := _by_name().get("".join(_words(text))):
        return [exact]
    patterns = [_pattern(word) for word in _split(text) if word != "gpu"]
    found = [g for g in list_gpus() if patterns and all(p.search(_facts(g)) for p in patterns)]
    if not found:
        known = (name for gpu in list_gpus() for name in (gpu.short, *gpu.aliases))
        raise UnknownName("GPU", text, known, hint=SEE_ALL)
    return found


def _choice(text: str, found: list[Gpu]) -> str:
    """Return the hint that lists the cards, or their chips where each is sold with several sizes of memory."""
    chips = list(dict.fromkeys("-".join(_model(gpu)) for gpu in found))
    if all(gpu.vendor == "Apple" for gpu in found) and len(found) > MOST_LISTED:
        return f"name the chip: {', '.join(chips)}; with its memory: {found[len(found) // 2].short}"
    return f"choose one of {_listed(found)}" if len(found) <= MOST_LISTED else f"'memfit gpus {text}' lists them"


@lru_cache(maxsize=64)  # a page asks it of one name at every move of a slider
def reading(text: str, gpu: Gpu) -> str:
    """Return a note on the chosen card if `text` also fits other cards of that model; else "".

    "h100" -> "'h100' read as H100 SXM (80 GB), not h100-pcie or h100-nvl".
    """
    others = [g for g in _having(_words(text)) if g is not gpu and _model(g) == _model(gpu)]
    if not others:
        return ""
    size = f"{gpu.sold_bytes // GB} GB"
    name = gpu.name if size in gpu.name else f"{gpu.name} ({size})"
    return f"'{text.strip()}' read as {name}, not {_listed(others)}"


def _counted(text: str) -> re.Match[str] | None:
    """Return the parts of a card that is given with a number; the patterns see no more than a name could be."""
    stripped = text.strip()
    if len(stripped) > 2 * MAX_NAME:
        return None
    return next((match for pattern in _COUNT if (match := pattern.fullmatch(stripped))), None)


def names_count(text: str) -> bool:
    """Return whether a card is given with a number: "8xh100", "h100:8"."""
    return _counted(text) is not None


def parse_gpu(text: str) -> tuple[Gpu, int]:
    """Parse a card and their number: "8xh100", "2 x rtx 4090", "h100:8", "4090" -> (Gpu, count)."""
    stripped, match = text.strip(), _counted(text)
    if match is None:
        return find_gpu(stripped), 1
    count = int(match["count"])
    if not 1 <= count <= MAX_COUNT:
        raise BadInput(f"'{stripped}' asks for {count} GPUs", hint=f"from 1 to {MAX_COUNT}, for example 8xh100")
    return find_gpu(match["name"]), count


def count_in_name(text: str) -> int | None:
    """Return how many cards "8xh100" asks for; None where the name holds no count."""
    match = _counted(text)
    return int(match["count"]) if match else None


def planned(name: str, memory: int) -> Gpu | None:
    """Return the card of `gpu` and `gpu_memory` in a recipe.toml; None if it has neither. Raises UnknownName."""
    row = parse_gpu(name)[0] if name not in ("", CUSTOM) else None
    return custom_gpu(memory, row) if memory else row


def other_card(text: str, file: RecipeFile) -> Gpu:
    """Return the card to run a recipe on instead of its own. Raises BadInput if the number of cards differs."""
    card, planned_for = parse_gpu(text)[0], file.recipe.num_gpus
    count = count_in_name(text) or planned_for
    if count == planned_for:
        return card
    again = shlex.join(["memfit", "plan", file.model, "--gpu", f"{count}x{card.short}", "--out", "run/"])
    raise BadInput(
        f"--gpu {text.strip()} asks for {several(count, 'GPU')}, and the recipe is for {planned_for}",
        hint=f"--gpu {card.short} keeps them; {again} finds a recipe for {count}",
    )


def memory_to_say(gpu: Gpu) -> int:
    """Return the card's bytes unless the table has the same number for its name; else 0."""
    return gpu.total_bytes if gpu.short == CUSTOM or find_gpu(gpu.short).total_bytes != gpu.total_bytes else 0


def custom_gpu(memory: int, base: Gpu | None = None) -> Gpu:
    """Return a card with `memory` bytes as CUDA reports them, otherwise like `base` or unknown.

    Raises BadInput when not even the CUDA context would fit.
    """
    context = base.context_bytes if base else UNKNOWN_CONTEXT
    if memory <= context:
        raise BadInput(
            f"{human(memory)} of GPU memory are not more than the CUDA context takes ({human(context)})",
            hint="give the card's memory with its unit, for example 24GiB",
        )
    if base is None:
        return Gpu(
            name=f"GPU with {human(memory)}", short=CUSTOM, vendor="", sold_bytes=memory, total_bytes=memory,
            context_bytes=context, unverified=("context_bytes",),
            note="nothing but its memory is known, so no times or prices",
        )  # fmt: skip
    return replace(
        base, name=f"{base.name} with {human(memory)}", aliases=(), sold_bytes=memory, total_bytes=memory,
        price_per_hour=None, spot_per_hour=None, price_source="",
        unverified=tuple(u for u in base.unverified if u != "total_bytes"),
        note=f"like {base.name}, with the memory that was given",
    )  # fmt: skip


# ---- the card in this machine ------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """The driver's report on one card; memory in bytes, 0 if it is not reported."""

    name: str
    total: int  # as nvidia-smi shows it
    reserved: int  # held by the driver: CUDA's total is total - reserved
    capability: tuple[int, int] | None


def local_gpu() -> Gpu:
    """Return PyTorch's cuda:0 on this machine with its measured memory, without making a CUDA context.

    NVML is asked through pynvml if that is installed, else nvidia-smi. Raises BadInput without an NVIDIA driver. With
    different cards CUDA numbers the fastest first and the driver by bus: set CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if device in ("", "-1"):
        raise BadInput(
            "CUDA_VISIBLE_DEVICES hides every GPU of this machine", hint="unset it, or name the card: --gpu rtx-4090"
        )
    seen = _ask_nvml(device) or _ask_smi(device)
    if seen is None:
        raise BadInput(
            "no NVIDIA GPU was found in this machine (neither NVML nor nvidia-smi answered)",
            hint="name the card: --gpu rtx-4090",
        )
    return recognise(seen)


def recognise(seen: Seen) -> Gpu:
    """Return the table's row for the reported card with the measured memory; a custom card if there is none."""
    measured, words = seen.total - seen.reserved, _words(seen.name)
    exact, model = _by_name().get("".join(words)), _without_form(words)
    rows = ([exact] if exact else []) + [g for g in list_gpus() if _model(g) == model]
    if exact and not measured:  # unified memory: the driver reports none
        return exact
    for row in rows:
        if abs(measured - row.total_bytes) <= SAME_CARD * row.total_bytes:
            rest = tuple(u for u in row.unverified if u != "total_bytes")
            return replace(row, total_bytes=measured, unverified=rest)
    if not measured:
        raise BadInput(
            f"the driver does not report how much memory the {seen.name} has", hint="give it: --gpu-memory 24GiB"
        )
    card = custom_gpu(measured)
    return replace(
        card,
        name=seen.name,
        short="-".join(_words(seen.name)) or "local",
        vendor="NVIDIA",
        compute_capability=seen.capability,
        sold_bytes=round(seen.total / GIB) * GB or measured,
    )


def _ask_nvml(device: str) -> Seen | None:
    """Ask pynvml; return None if it is not installed or finds no driver."""
    try:
        import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        by_index = device.isdecimal()
        handle = (pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID)(
            int(device) if by_index else device
        )
        name = pynvml.nvmlDeviceGetName(handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        text = name.decode() if isinstance(name, bytes) else str(name)
        return Seen(text, int(memory.total), int(memory.reserved), (int(capability[0]), int(capability[1])))
    except (pynvml.NVMLError, AttributeError):  # no driver, no such card, or a pynvml too old for memory v2
        return None


def _ask_smi(device: str) -> Seen | None:
    """Ask nvidia-smi; return None if it is missing, hangs or fails."""
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = ["--query-gpu=name,memory.total,memory.reserved,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [program, f"--id={device}", *query], capture_output=True, text=True, timeout=SMI_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return read_smi(done.stdout)


def read_smi(output: str) -> Seen | None:
    """Parse the first line of `nvidia-smi --query-gpu=name,memory.total,memory.reserved,compute_cap` (sizes in MiB).

    Returns None for anything unexpected.
    """
    cells = [cell.strip() for cell in output.strip().split("\n")[0].split(",")]
    if len(cells) != 4 or not cells[0]:
        return None
    total, reserved = (int(c) * MIB if c.isdecimal() else 0 for c in cells[1:3])  # "[N/A]" with unified memory
    capability = re.fullmatch(r"(\d+)\.(\d+)", cells[3])
    return Seen(cells[0], total, reserved, (int(capability[1]), int(capability[2])) if capability else None)


CGROUP = Path("/sys/fs/cgroup/memory.max")  # the limit of a container, cgroup v2


def local_host_memory() -> int:
    """Return the bytes of this machine's RAM, or of its container if that is limited to less; 0 if neither is known."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 0
    try:
        limit = CGROUP.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        limit = ""
    return min(total, int(limit)) if limit.isdecimal() else total


def available_host_memory() -> int:
    """Return the bytes of RAM that processes can still take, as Linux estimates it; elsewhere all of it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return local_host_memory()
    found = (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return next(found, local_host_memory())


# ---- names -------------------------------------------------------------------------------------------------------


@cache
def _by_name() -> dict[str, Gpu]:
    """Map short names, full names and aliases, without spaces and dashes, to their rows: 'rtx4090'."""
    return {"".join(_words(name)): g for g in list_gpus() for name in (g.name, *g.aliases, g.short)}


def _words(text: str) -> tuple[str, ...]:
    """Return the words that distinguish cards: 'Tesla V100-SXM2-16 GB' -> ('v100', 'sxm2', '16gb')."""
    return tuple(w for w in _split(text) if not _MAKERS.fullmatch(w))


def _split(text: str) -> list[str]:
    """Return the words of a text; a size is one word ('64 GB' -> '64gb'), and so is a Mac ('MacBook Pro' -> 'mac')."""
    joined = re.sub(r"(\d)\s+(gb)\b", r"\1\2", text.lower())
    return re.findall(r"[a-z0-9]+", _MACS.sub("mac", joined))


def _model(gpu: Gpu) -> tuple[str, ...]:
    """Return the words of a card's name without form factor and memory: 'H100 SXM' -> ('h100',)."""
    return _without_form(_words(gpu.name))


def _without_form(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(w for w in words if not _FORM.fullmatch(w))


def _having(words: Iterable[str]) -> list[Gpu]:
    """Return the cards whose names, with their memory, contain every word; 'a10' does not match 'a100'."""
    patterns = [_pattern(word) for word in words]
    return [g for g in list_gpus() if patterns and all(p.search(_haystack(g)) for p in patterns)]


@cache
def _haystack(gpu: Gpu) -> str:
    names = _words(" ".join((gpu.short, gpu.name, *gpu.aliases)))
    return "-".join((*names, f"{gpu.sold_bytes // GB}gb"))


@cache
def _facts(gpu: Gpu) -> str:
    """Return a card's names, vendor, architecture and memory, in which `described` searches."""
    words = _split(" ".join((gpu.short, gpu.name, *gpu.aliases, gpu.vendor, gpu.arch, _CALLED.get(gpu.vendor, ""))))
    return "-".join((*words, f"{gpu.sold_bytes // GB}gb"))


def _pattern(word: str) -> re.Pattern[str]:
    """Match 'rtx4090' in 'rtx-4090': a dash may stand between letters and digits, and no run of either is cut."""
    runs = re.findall(r"[a-z]+|\d+", word)
    before, after = (r"\d" if run[0].isdigit() else "[a-z]" for run in (runs[0], runs[-1]))
    return re.compile(f"(?<!{before})" + "-?".join(runs) + f"(?!{after})")


def _listed(gpus: Iterable[Gpu]) -> str:
    *rest, last = (g.short for g in gpus)
    return f"{', '.join(rest)} or {last}" if rest else last
