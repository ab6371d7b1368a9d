"""Read the Footprint of any file that describes a run, predicted, traced or measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path

from memfit.allocator.replay import as_recorded
from memfit.catalogue import cards
from memfit.closed_form.run.estimate import estimate
from memfit.documents import codec, recipe_file, snapshot, tape_file, watch_log
from memfit.errors import BadInput, MemfitError
from memfit.footprints.footprint_of_trace import footprint_of as traced_footprint
from memfit.footprints.footprint_of_watch import footprint_of
from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import RecipeFile
from memfit.nouns.tape import Oom, Tape
from memfit.reading import bounds

Predicted = Footprint | Tape | RecipeFile | str | PathLike[str]
MOST = 1 << 30  # bytes of the largest file that is read
NO_CONTEXT = "context of the driver"  # an unknown of tapes that name no card
WANTED = "a tape, a snapshot, a watch's .jsonl, a recipe.toml, or what memfit estimate, plan or trace --json printed"


def read(path: Path, gpu: str = "", device: int | None = None) -> Footprint:
    """Read the footprint in a file, whose kind is recognised by its content.

    A recipe.toml is estimated on `gpu`, or on the card it names. For a tape that names no card, `gpu` gives the size of
    the CUDA context. `device` chooses a card of a snapshot. Raises BadInput for any other file.
    """
    hint = f"give {WANTED}"
    size = bounds.size_of(path, MOST, hint)
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}", hint=hint) from None
    try:
        if path.suffix == ".toml":
            file = recipe_file.read(path)
            return of_recipe(file, cards.other_card(gpu, file) if gpu else None)
        card = cards.parse_gpu(gpu)[0] if gpu else None
        if watch_log.known(head):
            with bounds.memory(size, str(path), hint):
                return _watched(bounds.content_of(path, MOST, hint))
        if head.lstrip().startswith(b"{") and b'"memfit.' in head and not tape_file.known(head):
            with bounds.memory(size, str(path), hint):
                return _document(bounds.content_of(path, MOST, hint))
        with snapshot.memory(path):
            return of_tape(snapshot.read(path, device), card)
    except BadInput as error:
        raise error if str(path) in error.message else recipe_file.in_file(error, path) from None


def of(predicted: Predicted | None, gpu: Gpu | None = None) -> Footprint | None:
    """Return a prediction of any kind as a Footprint without its lines.

    Where it names no card, `gpu`, the card to compare it with, gives the size of the CUDA context.
    """
    if predicted is None:
        return None
    if isinstance(predicted, Footprint):
        found = predicted
    elif isinstance(predicted, Tape):
        found = of_tape(predicted)
    elif isinstance(predicted, RecipeFile):
        found = of_recipe(predicted)
    else:
        found = read(Path(predicted))
    context = gpu.context_bytes if gpu and NO_CONTEXT in found.unknowns else 0
    return replace(found, phases=tuple(_without_lines(peak, context) for peak in found.phases))


def _without_lines(peak: PhasePeak, context: int) -> PhasePeak:
    return replace(peak, levels=replace(peak.levels, device=peak.levels.device + context), lines=())


def of_tape(tape: Tape, gpu: Gpu | None = None) -> Footprint:
    """Replay a tape as it was recorded, with the CUDA context of `gpu`, or of the card that the tape names."""
    if not tape.events:
        raise BadInput("the tape is empty", hint="record a run")
    if tape.is_instant:
        raise BadInput(
            "it holds a single instant, from which no peak can be read",
            hint="torch.cuda.memory._record_memory_history() before the run",
        )
    with suppress(MemfitError):  # the card is not in the catalogue
        gpu = gpu or (cards.find_gpu(tape.about["gpu"]) if tape.about.get("gpu") else None)
    context = gpu.context_bytes if gpu else 0
    unknowns = () if context else (NO_CONTEXT,)
    chosen = (tape.about["chosen"],) if tape.about.get("chosen") else ()
    found = traced_footprint(tape, as_recorded(tape), chosen, unknowns, context)
    last = next((event for event in reversed(tape.events) if isinstance(event, Oom)), None)
    return replace(found, source=tape.source, refused=last.size if last and tape.ends_in_oom else 0)


def of_recipe(file: RecipeFile, gpu: Gpu | None = None) -> Footprint:
    """Estimate a recipe.toml by formula."""
    card = gpu or cards.planned(file.gpu, file.gpu_memory)
    if card is None:
        raise BadInput("the recipe names no card", hint='add under [job]: gpu = "rtx-4090"')
    return estimate(recipe_file.architecture_of(file), file.recipe, card, reserve=file.reserve)


def _watched(content: bytes) -> Footprint:
    found = footprint_of(watch_log.loads(content))
    if not found.phases:
        raise BadInput("the watch recorded nothing", hint="let the run take a step")
    return found


def _document(content: bytes) -> Footprint:
    found = codec.loads(content)
    if isinstance(found, codec.ReplayDoc):
        phases = tuple(PhasePeak(span.phase, span.instant, span.levels, ()) for span in found.phases)
        return Footprint(phases, found.source, unknowns=() if found.gpu else (NO_CONTEXT,))
    if not isinstance(found, codec.Body):
        raise BadInput("the document does not describe a single recipe", hint=f"give {WANTED}")
    return codec.footprint_of(found)


__all__ = ["Predicted", "of", "of_recipe", "of_tape", "read"]
