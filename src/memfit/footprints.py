"""Any file that holds a run, predicted, traced or measured, as its Footprint: what two of them are compared by."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path

from memfit import cards, codec, hub, recipe_file, snapshot, watch_file
from memfit.alloc_conf import parse_alloc_conf
from memfit.errors import BadInput
from memfit.footprint import Footprint
from memfit.formula.estimate import estimate
from memfit.gpu import Gpu
from memfit.measured import footprint_of
from memfit.recipe_file import RecipeFile
from memfit.replay import replay
from memfit.tape import Tape
from memfit.traced import footprint_of as traced_footprint

Predicted = Footprint | Tape | RecipeFile | str | PathLike[str]
MOST = 1 << 30  # bytes of a file
WANTED = "a tape, a snapshot, a watch's .jsonl, a recipe.toml, or what memfit estimate, plan or trace --json printed"


def read(path: Path, gpu: Gpu | None = None) -> Footprint:
    """The footprint in a file, told by its content; of a recipe.toml the predicted one, on `gpu` or the card it names.

    Raises BadInput for anything else.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
        size = path.stat().st_size
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}", hint=f"give {WANTED}") from None
    if size > MOST:
        raise BadInput(f"{path} has more than {MOST >> 20} MiB", hint=f"give {WANTED}")
    try:
        if watch_file.known(head):
            return _watched(path.read_bytes())
        if head.lstrip().startswith(b"{") and b'"memfit.' in head:
            return _document(path)
        if path.suffix == ".toml":
            return of_recipe(recipe_file.read(path), gpu)
        return of_tape(snapshot.read(path))
    except BadInput as error:
        raise error if str(path) in error.message else recipe_file.in_file(error, path) from None


def of(predicted: Predicted | None) -> Footprint | None:
    """Whatever says what a run should need, as a Footprint of levels alone: its lines are left out."""
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
    return replace(found, phases=tuple(replace(p, lines=()) for p in found.phases))


def of_tape(tape: Tape) -> Footprint:
    """A tape replayed under its own settings; its context is not in it."""
    settings = parse_alloc_conf(tape.about.get("alloc_conf", ""))
    timeline = replay(tape.events, settings=settings, start=tape.start)
    if not timeline.spans:
        raise BadInput("the tape is empty", hint="record a run")
    found = traced_footprint(tape, timeline, (), ("context of the driver",), 0)
    return replace(found, source=tape.source)


def of_recipe(file: RecipeFile, gpu: Gpu | None = None) -> Footprint:
    """What the formulas say of a recipe.toml."""
    card = gpu or cards.planned(file.gpu, file.gpu_memory)
    if card is None:
        raise BadInput("the recipe names no card", hint='add under [job]: gpu = "rtx-4090"')
    return estimate(hub.resolve_model(file.model), file.recipe, card)


def _watched(content: bytes) -> Footprint:
    found = footprint_of(watch_file.loads(content))
    if not found.phases:
        raise BadInput("the watch saw nothing", hint="let the run take a step")
    return found


def _document(path: Path) -> Footprint:
    found = codec.loads(path.read_bytes())
    if not isinstance(found, codec.Body):
        raise BadInput("the document is about no single recipe", hint=f"give {WANTED}")
    return codec.footprint_of(found)


__all__ = ["Predicted", "of", "of_recipe", "of_tape", "read"]
