"""memfit trace on several cards: the script is traced on the ranks that differ, and the worst one gives the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.allocator.replay import replay
from memfit.cli import terminal
from memfit.cli.flags import Flag
from memfit.closed_form.parallel.sharding import nccl_bytes
from memfit.documents.codec import RankDoc, rank_doc
from memfit.documents.output_files import write_files
from memfit.documents.tape_file import dumps
from memfit.errors import BadInput
from memfit.footprints.rank_peaks import RankPeak, peak_of_rank, worst_first
from memfit.nouns.alloc_settings import AllocSettings, Torch, parse_alloc_conf, torch_version
from memfit.nouns.gpu import Gpu
from memfit.report.rank_lanes_html import rank_lanes
from memfit.report.ranks import ranks_view
from memfit.virtual.ranks import place
from memfit.virtual.ranks.place import Place
from memfit.virtual.ranks.traced import (
    DISTINCT,
    RankClass,
    RanksTask,
    RanksTrace,
    ScriptOutcome,
    TracedRank,
    parse_ranks,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


RANKS = Flag(
    "ranks", str, "Ranks to trace: those that differ, all, the last, or by number. Default: distinct.",
    "distinct|all|last|0,3",
)  # fmt: skip
PER_NODE = Flag("gpus_per_node", int, "Cards of one machine of the cluster. Default: 8.", "N")
SAVE_RANKS = Flag("save", str, "Write one tape for each traced rank into this folder, for memfit replay.", "DIR")
FLAGS = (RANKS, PER_NODE, SAVE_RANKS)


def check_ranks(flags: Mapping[str, Any], world_size: int) -> tuple[int, ...]:
    """Return the ranks to trace, () for the distinct ones. Raises BadInput for flags that mean nothing."""
    for flag in FLAGS:
        if flags[flag.name] is not None and world_size == 1:
            raise BadInput(f"{flag.flag} is for jobs on several cards", hint="--gpu 8xh100 names eight")
    Place(0, world_size, per_node(flags))
    save = flags["save"]
    if save and Path(save).exists() and not flags["force"] and (not Path(save).is_dir() or any(Path(save).iterdir())):
        raise BadInput(f"--save {save}: it is there already", hint="name a new folder, or add --force")
    return parse_ranks(flags["ranks"] or DISTINCT, world_size) if world_size > 1 else (0,)


def per_node(flags: Mapping[str, Any]) -> int:
    """Return the cards of each machine."""
    return place.PER_NODE if flags["gpus_per_node"] is None else int(flags["gpus_per_node"])


@dataclass(frozen=True, slots=True)
class TracedJob:
    """A job's traced ranks and their peaks, the worst first. worst: that rank's trace."""

    found: RanksTrace
    peaks: tuple[RankPeak, ...]
    worst: TracedRank

    @property
    def outcome(self) -> ScriptOutcome:
        """Return how the worst rank ended, and what was assumed and what grows on any."""
        assumed = dict.fromkeys(self.worst.outcome.assumed)
        for trace in self.found.traces:
            assumed |= dict.fromkeys(s for s in trace.outcome.assumed if not s.startswith(f"rank {trace.rank} of"))
        silent = {rank for trace in self.found.traces for rank in trace.silent}
        silent -= {trace.rank for trace in self.found.traces}  # these had made their steps, and ended
        if silent:
            text = ", ".join(map(str, sorted(silent)))
            assumed[f"messages of ranks that are not traced ({text}): what the traced ones sent last"] = None
        assumed |= dict.fromkeys(_checked(self.found, self.peaks))
        grown = {tuple(h.place for h in leak.holders): leak for t in self.found.traces for leak in t.outcome.leaks}
        routed = max(trace.outcome.routed for trace in self.found.traces)
        return replace(self.worst.outcome, assumed=tuple(assumed), leaks=tuple(grown.values()), routed=routed)

    def view(self, world_size: int) -> RenderableType:
        """Return the table of ranks."""
        return ranks_view(self.peaks, world_size)

    def lanes(self, settings: AllocSettings, torch: Torch, usable: int) -> Callable[[], str]:
        """Return what draws the traced ranks below the timeline of the worst; `usable`: without NCCL's buffers."""

        def drawn() -> str:
            tapes = {trace.rank: trace.tape for trace in self.found.traces}
            return rank_lanes([(peak, tapes[peak.rank]) for peak in self.peaks], settings, torch, usable)

        return drawn

    def document(self) -> tuple[RankDoc, ...]:
        """Return the ranks as they are in the JSON document."""
        return tuple(map(rank_doc, self.peaks))


def traced_job(
    words: Mapping[str, Any], answers: Sequence[str], world_size: int, processes: int, ranks: tuple[int, ...],
    reserve: int,
) -> TracedJob:  # fmt: skip
    """Trace a script on these ranks. words: arguments of `trace_script`.

    processes: on each machine; reserve: bytes to leave free on each card.
    """
    from memfit.virtual.scripts.rank_processes import trace_ranks

    with terminal.progress() as tell:
        found = trace_ranks(RanksTask(words, answers, world_size, processes, ranks), tell)
    made = _peaks(found, world_size, words["gpu"], reserve, words["alloc_conf"])
    return TracedJob(found, tuple(made), next(t for t in found.traces if t.rank == made[0].rank))


def _peaks(found: RanksTrace, world_size: int, gpu: Gpu, reserve: int, conf: str) -> list[RankPeak]:
    """Return the peak of each traced rank, the worst first."""
    made = []
    for trace in found.traces:
        torch = torch_version(trace.tape.about["torch"])
        timeline = replay(trace.tape.events, settings=parse_alloc_conf(conf, torch), torch=torch)
        own = _class_of(trace, found)
        groups = [(c.name, c.size, sum(c.calls.values())) for c in trace.facts.own if c.size > 1]
        made.append(
            peak_of_rank(
                trace.rank, own.members, own.what, trace.tape, timeline, gpu.usable_bytes(reserve), groups,
                nccl_bytes(world_size, trace.outcome.communicators), trace.outcome.ending == "oom",
            )
        )  # fmt: skip
    return worst_first(made)


def _class_of(trace: TracedRank, found: RanksTrace) -> RankClass:
    """Return the class of a traced rank; a rank that is not as its class says is one of its own."""
    own = next((c for c in found.classes if c.rank == trace.rank), None)
    if own is None:
        what = next((c.what for c in found.classes if trace.rank in c.members), "")
        return RankClass(trace.rank, (trace.rank,), what)
    others = {t.rank for t in found.traces} - {trace.rank}
    return RankClass(own.rank, tuple(m for m in own.members if m not in others), own.what)


def _checked(found: RanksTrace, ranks: Sequence[RankPeak]) -> list[str]:
    """Return what was found where two ranks of one class were compared."""
    need = {rank.rank: rank.levels for rank in ranks}
    lines = []
    for one, other, equal in found.twins:
        if equal:
            lines.append(f"ranks {one} and {other} were both traced: equal to the byte")
        elif need.get(one) == need.get(other):
            lines.append(f"ranks {one} and {other} were both traced: equal peaks, in another order")
        else:
            whole = all(len(rank.members) == 1 for rank in ranks)
            then = "so all ranks were traced" if whole else "see --ranks all"
            lines.append(f"ranks {one} and {other} differ, though their groups are alike: {then}")
    return lines


def save_ranks(found: RanksTrace, folder: str, force: bool) -> None:
    """Write one tape a rank."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    made = {Path(folder) / f"rank-{trace.rank}.tape.gz": dumps(trace.tape) for trace in found.traces}
    write_files(made, force)
    terminal.note(f"wrote {len(made)} tapes: memfit replay {next(iter(made))} --gpu NAME")
