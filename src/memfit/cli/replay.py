"""memfit replay: run a saved tape or snapshot through the allocator of another card or with other settings."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.allocator.capacity import Capacity, capacity
from memfit.catalogue import cards
from memfit.cli import terminal
from memfit.cli.flags import CARD, COMMON, DEVICE, Argument, Flag, takes
from memfit.cli.terminal import EXIT_OF
from memfit.documents.output_files import write_files
from memfit.documents.snapshot import memory, read
from memfit.documents.tape_file import dumps
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, Torch, parse_alloc_conf, torch_version
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Tape
from memfit.report.replay import replay_view
from memfit.units import parse_size

EXAMPLES = (
    "memfit replay oom.pickle --gpu l40s --alloc-conf expandable_segments:True",
    "memfit replay run.tape.gz --gpu-memory 16GiB --html timeline.html",
)
TAPE = Argument("tape", "a tape written with --save-tape, or a snapshot of torch.cuda.memory", "FILE", required=True)
GPU = Flag("gpu", str, "A card from 'memfit gpus', or 'local'. Default: a card without a limit.", "NAME")
OWN = (
    Flag("alloc_conf", str, "PYTORCH_ALLOC_CONF to replay with. Default: the recorded one.", "TEXT"),
    Flag("torch", str, "The PyTorch version whose allocator to use. Default: the recorded one.", "2.13"),
    DEVICE,
    Flag("save_tape", str, "Write the tape to this file, for a later replay.", "FILE"),
    Flag("snapshot", str, "Write a snapshot that pytorch.org/memory_viz opens.", "FILE"),
    Flag("html", str, "Write a timeline to open in a browser, without a network.", "FILE"),
    Flag("force", bool, "Overwrite files.", default=False),
)
FILES = ("save_tape", "snapshot", "html")


@takes(GPU, *CARD[1:], *OWN, *COMMON, argument=TAPE)
def run(tape: str, **flags: Any) -> int:
    """Replay a saved tape or snapshot on another card.

    Shows whether it fits, where memory runs out, the smallest card it runs on, and what the allocator holds beyond the
    tensors. Without --gpu the card has no limit.
    """
    check(flags)
    gpu = card(flags)
    with memory(Path(tape)):
        found = read(Path(tape), flags["device"])
        terminal.note_card(found)
        text = flags["torch"] or found.about.get("torch", "")
        torch = torch_version(text) if text else LATEST_TORCH
        conf = found.about.get("alloc_conf", "") if flags["alloc_conf"] is None else flags["alloc_conf"]
        settings = parse_alloc_conf(conf, torch)
        with terminal.progress() as tell:
            answer = capacity(found, settings, torch, gpu, reserve(flags, gpu), tell)
    version = ".".join(map(str, torch))
    usable = answer.judgement.usable if answer.judgement else None
    title = Path(tape).name + (f" on {gpu.name}" if gpu else "")
    write(found, title, flags, settings, torch, usable, gpu)
    if flags["json"]:
        from memfit.documents.codec import replay_doc

        terminal.show_json(replay_doc(found, answer, gpu, version, conf))
    else:
        terminal.show(replay_view(Path(tape).name, found, answer, settings, version, conf, gpu, _next(tape, flags)))
    return EXIT_OF[answer.judgement.verdict] if answer.judgement else 0


def check(flags: dict[str, Any]) -> None:
    """Refuse files that cannot be written, before anything is computed."""
    wanted = [flags[name] for name in FILES if flags[name]]
    if flags["force"] and not wanted:
        raise BadInput("--force needs a file to write", hint="--html timeline.html")
    if len(set(wanted)) < len(wanted):
        raise BadInput("two output files have the same name", hint="give each its own")
    terminal.check_files(flags, *FILES)


def card(flags: dict[str, Any]) -> Gpu | None:
    """Return the named card, None if there is none. Raises BadInput for several."""
    gpu, count = cards_of(flags)
    if count > 1:
        raise BadInput(f"a tape is of one card, and --gpu {flags['gpu']} names {count}", hint="leave the count out")
    return gpu


def cards_of(flags: dict[str, Any]) -> tuple[Gpu | None, int]:
    """Return the named card, None if there is none, and the number of cards."""
    named, memory = flags["gpu"], flags["gpu_memory"]
    here = (cards.local_gpu(), 1) if named == "local" else None
    gpu, count = here or (cards.parse_gpu(named) if named else (None, 1))
    return (cards.custom_gpu(parse_size(memory), gpu) if memory else gpu), count


def reserve(flags: dict[str, Any], gpu: Gpu | None) -> int:
    """Return the bytes of --reserve."""
    if not flags["reserve"]:
        return 0
    size = parse_size(flags["reserve"])
    if gpu is None:
        raise BadInput("--reserve needs a card", hint="--gpu rtx-4090 --reserve 1GiB")
    if size >= gpu.usable_bytes():
        raise BadInput(f"--reserve {flags['reserve']} leaves nothing of the {gpu.name}", hint="1GiB is usual")
    return size


def write(
    tape: Tape, title: str, flags: dict[str, Any], settings: AllocSettings, torch: Torch,
    usable: int | None, gpu: Gpu | None, below: Callable[[], str] = str,
) -> None:  # fmt: skip
    """Write the requested files: tape, snapshot, and timeline on the given card. below: HTML of more pictures."""
    made: dict[Path, bytes] = {}
    if flags["save_tape"]:
        about = {key: value for key, value in tape.about.items() if key != "chosen"}  # a tape holds one card
        made[Path(flags["save_tape"])] = dumps(replace(tape, about=about))
    if flags["snapshot"]:
        from memfit.documents.snapshot_writer import snapshot_pickle

        made[Path(flags["snapshot"])] = snapshot_pickle(tape, settings, torch, usable)
    if flags["html"]:
        total = gpu.total_bytes if gpu else None
        from memfit.cli.web_files import look
        from memfit.report.timeline_html import timeline_html

        page = timeline_html(title, tape, settings, torch, look(), usable, total, below())
        made[Path(flags["html"])] = page
    write_files(made, flags["force"])
    for path in made:
        terminal.note(f"wrote {path}")


def with_nccl(answer: Capacity, nccl: int) -> Capacity:
    """Add NCCL's buffers, which lie outside PyTorch's counters, to what a run on several GPUs needs."""
    judgement = answer.judgement
    assert judgement is not None
    return replace(answer, judgement=replace(judgement, usable=judgement.usable + nccl, need=judgement.need + nccl))


def _next(tape: str, flags: dict[str, Any]) -> list[str]:
    """Return the commands to type next."""
    words = ["memfit", "replay", tape]
    named = [
        part for name in ("gpu", "gpu_memory") if flags[name] for part in ("--" + name.replace("_", "-"), flags[name])
    ]
    found = []
    if flags["alloc_conf"] is None:
        found.append([*words, *named, "--alloc-conf", "expandable_segments:True"])
    if not flags["html"]:
        found.append([*words, *named, "--html", "timeline.html"])
    if not named:
        found.insert(0, [*words, "--gpu", "rtx-4090"])
    return [shlex.join(line) for line in found]
