"""memfit.watch(): live memory of any training loop against the prediction, with leaks named."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memfit.errors import BadInput, MissingExtra

try:
    import torch
except ImportError:
    raise MissingExtra("memfit.watch", "trace") from None

from memfit.documents import footprint_file as footprints
from memfit.live.watch.handle import Watch
from memfit.live.watch.meters import meter_for
from memfit.live.watch.recorder import Recorder, Screen, check_log
from memfit.live.watch.screens import screen_for
from memfit.live.watch.sinks import open_sinks
from memfit.nouns.sample import Header

LOG = "memfit-watch.jsonl"


def watch(
    model: Any = None,
    optimizer: Any = None,
    *,
    predicted: footprints.Predicted | None = None,
    log: str | os.PathLike[str] | None = LOG,
    to: Iterable[str] = (),
    live: bool = False,
    quiet: bool = False,
    find_leaks: bool = True,
    reset_peaks: bool = True,
    count_every: int | None = None,
    name: str = "",
    screen: Screen | None = None,
) -> Watch:
    """Watch a training loop from here on.

    model, optimizer: as the loop has them; with an optimizer its steps are counted by themselves, with a model
    evaluation is told from training. predicted: a Footprint, a Tape, or a file (recipe.toml, tape, snapshot, JSON of
    memfit estimate, log of another watch) to hold the run against. log: JSON lines are appended here; None: nowhere.
    to: sinks besides, "tensorboard:runs/a", "wandb", "prometheus:9400". live: a view in the terminal instead of lines.
    reset_peaks: give every step a peak of its own by torch.cuda.reset_peak_memory_stats. count_every: on a run without a
    card, count live tensors every so many steps instead of when there is time; every step is looked at, however short.
    screen: shows the run instead. Raises MemfitError for bad arguments.
    """
    if model is not None and not callable(getattr(model, "parameters", None)):
        raise BadInput(
            f"memfit.watch takes one model, not a {type(model).__name__}",
            hint="torch.nn.ModuleList(models), or a watch with a log of its own for each",
        )
    if isinstance(optimizer, list | tuple | dict):
        raise BadInput(
            f"memfit.watch takes one optimizer, not a {type(optimizer).__name__}",
            hint="the one whose steps are to be counted, or none and watch.step()",
        )
    if count_every is not None and count_every < 1:
        raise BadInput(
            f"count_every must be at least 1, not {count_every}", hint="count_every=1 counts tensors at every step"
        )
    meter = meter_for(model, reset_peaks, count_every)
    header = Header(
        name=name or Path(sys.argv[0] or "python").name, meter=meter.name, card=meter.card, total=meter.total,
        started=datetime.now(UTC).isoformat(timespec="seconds"), torch=torch.__version__.partition("+")[0],
        predicted=footprints.of(predicted),
    )  # fmt: skip
    path = _of_rank(log)
    check_log(path)  # before sinks open files and ports
    recorder = Recorder(header, path, open_sinks(to, header), screen or screen_for(live, quiet))
    return Watch(recorder, meter, model, optimizer, find_leaks=find_leaks, paced=count_every is None)


def _of_rank(log: str | os.PathLike[str] | None) -> Path | None:
    """Every rank of a run writes a file of its own: run.jsonl, run.rank1.jsonl."""
    if log is None:
        return None
    path, rank = Path(log), os.environ.get("RANK", "0")
    return path if rank in ("", "0") or not rank.isdigit() else path.with_suffix(f".rank{rank}{path.suffix}")
