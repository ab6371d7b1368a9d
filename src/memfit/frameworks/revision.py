"""Write a plan into the user's own file: only the keys that the plan changes, and a line on what changed and why.

What memfit would write for the file's recipe is compared with what it writes for the plan's. Where both are the same,
the file stays as it is, in whatever words it says so.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import memfit.frameworks.accelerate as accelerate
import memfit.frameworks.axolotl as axolotl
import memfit.frameworks.deepspeed as deepspeed
import memfit.frameworks.llamafactory as llamafactory
import memfit.frameworks.names as names
from memfit.documents.recipe_file import read_text
from memfit.errors import MemfitError, Unsupported
from memfit.frameworks import process_layout
from memfit.frameworks.keys import Adopted, Source, at, is_off, parsed
from memfit.frameworks.own_files import OWN, OwnFile
from memfit.frameworks.reading import adopt
from memfit.frameworks.text import comment, head
from memfit.frameworks.text_edit import REMOVED, KeyPath, edited
from memfit.nouns.job import RECIPE_FIELDS, Precision, Recipe, Training
from memfit.nouns.plan import Plan
from memfit.reading.settings_text import is_json
from memfit.tables.loading import loading_of
from memfit.tables.precisions import meaning
from memfit.tables.trainers import script_of
from memfit.units import MIB, human

KEPT: Precision = "bf16"  # stands for a precision that stays as the file has it
ASKED, AGAIN, MOVED = "as asked", "said in full", "the file lies elsewhere now"
_NOT_IN_FILES = ("num_gpus", "trainer", "alloc_conf")  # recipe fields that no framework's file has to hold
_HEAD = re.compile(
    r"\A# .*\n# written by memfit .*\n"
    r"(?:# (?:PYTORCH|FORCE_TORCHRUN|axolotl |llamafactory-cli ).*\n)?(?:# changed: .*\n)?"
)
_SAVED = re.compile(r"  # saves .* against .*$", re.M)


@dataclass(frozen=True, slots=True)
class Revised:
    """The user's file with a plan's values, the files it names, and a line on what changed."""

    files: dict[str, str]
    line: str


def revised(plan: Plan, adopted: Adopted) -> Revised:
    """Return the user's file with the plan's values, and the files it names. Raises Unsupported.

    The written file is read back: where it does not say what the plan says, all keys of the recipe are written anew,
    and what the file cannot say is named in the line.
    """
    own, source = OWN[adopted.format], adopted.source
    assert source is not None
    name, steps = own.name or source.path.name, _steps(plan, adopted)
    try:
        made, unsaid = _attempt(plan, adopted, steps, anew=False)
    except Unsupported:
        if steps[0][1].precision == plan.recipe.precision != KEPT:
            return _with_its_precision(plan, adopted)
        raise
    if unsaid:
        again, left = _attempt(plan, adopted, steps, anew=True)
        if len(left) < len(unsaid):
            made, unsaid = again, left
    files, line = made.files, _words(made) or "nothing"
    if unsaid and not own.launcher:
        instead = "" if own.start else f" (--target {script_of(plan.recipe.trainer)} writes a script with all)"
        line += f"; not a setting of this file: {', '.join(unsaid)}{instead}"
    if not is_json(files[name]):
        more = (*([own.command(plan)] if own.command else []), f"changed: {comment(line)}")
        files[name] = "\n".join([*head(plan, own.version or "your script", *more), files[name]])
    return Revised(files, f"{name}: changed: {line}")


def _with_its_precision(plan: Plan, adopted: Adopted) -> Revised:
    """Return the revised file where memfit cannot write the precision that the file has and the plan keeps."""
    rungs = tuple(replace(rung, recipe=rung.recipe.but(precision=KEPT)) for rung in plan.ladder)
    same = replace(adopted, recipe=adopted.recipe.but(precision=KEPT))
    return revised(replace(plan, recipe=plan.recipe.but(precision=KEPT), ladder=rungs), same)


def _attempt(
    plan: Plan, adopted: Adopted, steps: list[tuple[str, Recipe]], anew: bool
) -> tuple[FileRevision, list[str]]:
    """Return the changes, and the fields of the recipe that the files do not say when they are read back."""
    own, source = OWN[adopted.format], adopted.source
    assert source is not None
    made = FileRevision(own, plan, steps, source, anew).found()
    unsaid = _move(made, adopted)
    name = own.name or source.path.name
    made.files[name] = edited(_without_head(source.text), source.data, made.values)
    return made, [*_unsaid(plan, steps[0][1], name, made.files), *unsaid]


def _steps(plan: Plan, adopted: Adopted) -> list[tuple[str, Recipe]]:
    """Return the recipes from the file's to the plan's, each with the title of the rung that made it."""
    first = adopted.recipe if OWN[adopted.format].counts else adopted.recipe.but(num_gpus=plan.recipe.num_gpus)
    steps, gpu = [("", first)], plan.job.gpu
    if adopted.half_open and not gpu.bf16:
        steps.append((f"the {gpu.name} has no bf16 units", first.but(precision="fp16-mixed")))
    for i, rung in enumerate(plan.ladder):
        saved = f", saves {human(rung.saved)}" if i and rung.saved >= MIB else ""
        steps.append((rung.title.lstrip("+= ") + saved if i else ASKED, rung.recipe))
        if rung.recipe == plan.recipe:
            return steps
    return [*steps, (ASKED if len(steps) == 1 else "chosen by the search", plan.recipe)]


# ---- what changes


@dataclass(slots=True)
class FileRevision:
    """The changes to one file that take its recipe to the plan's, each with its reason."""

    own: OwnFile
    plan: Plan
    steps: list[tuple[str, Recipe]]
    source: Source
    anew: bool  # all keys of the recipe are written, not only those that differ
    values: dict[KeyPath, Any] = field(default_factory=dict)
    why: dict[KeyPath, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # others, which the file names

    def set(self, path: KeyPath, value: Any, why: str) -> None:
        """Change one setting."""
        self.values[path], self.why[path] = value, why

    def found(self) -> FileRevision:
        """Return this revision with the changes that the recipe needs."""
        data = self.source.data
        new = self._settings(self.plan.recipe)
        old = before = self._written(self.steps[0][1]) or {}
        for title, recipe in self.steps[1:]:
            after = self._written(recipe)
            if after is not None:
                self.why.update((path, title) for path, _ in _difference(before, after))
                before = after
        self.values = dict(_difference(old, new))
        self._complete(new)
        self._zero(new)
        self._merge_plugins(old, new)
        for path in self.own.by_script:
            if at(data, path) is True:
                self.set(path, False, "train.py does")
        for path in list(self.values):
            placed = _as_in_file(path, data)
            value, why = self.values.pop(path), self.why.pop(path, ASKED)
            present = at(data, placed)
            if is_off(present) if value is REMOVED else present == value and type(present) is type(value):
                continue
            self.set(placed, value, why)
        return self

    def _settings(self, recipe: Recipe) -> dict[str, Any]:
        """Return what memfit writes for a recipe, the same model and no data. Raises Unsupported."""
        job = replace(self.plan.job, dataset="", training=Training(learning_rate=1e-4))
        return self.own.config(replace(self.plan, job=job, recipe=recipe), self.source.data)

    def _written(self, recipe: Recipe) -> dict[str, Any] | None:
        """Return the same; None for a recipe that the file cannot express."""
        try:
            return self._settings(recipe)
        except Unsupported:
            return None

    def _complete(self, new: Mapping[str, Any]) -> None:
        """Write a whole group of keys where the file uses other names for one of them, or where all is written anew.

        What memfit did not understand stays, unless the plan changes it.
        """
        data = self.source.data
        for group, aliases in self.own.groups:
            changed = [path for path in self.values if path[0] in group]
            others = [path for path in aliases if not is_off(at(data, path))]
            if not (self.anew or (changed and others)):
                continue
            why = next((self.why[path] for path in changed if path in self.why), AGAIN)
            keys = [name for name in group if name not in self.source.unknown]
            more: dict[KeyPath, Any] = dict.fromkeys(others, REMOVED)
            more |= {(name,): REMOVED for name in keys if name in data and name not in new and name not in _LEAFWISE}
            more |= dict(_difference({}, {name: new[name] for name in keys if name in new}))
            for path, value in more.items():
                self.set(path, value, self.why.get(path, why))

    def _merge_plugins(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Keep the plugins of the user beside the one of the loss, except another fused loss."""
        path, plugins = (axolotl.PLUGINS,), self.source.data.get(axolotl.PLUGINS)
        if path not in self.values or not isinstance(plugins, list):
            return
        added, gone = new.get(axolotl.PLUGINS, []), old.get(axolotl.PLUGINS, [])
        kept = [one for one in plugins if one not in gone and not (added and "cut_cross_entropy" in str(one))]
        self.values[path] = [*kept, *(one for one in added if one not in kept)] or REMOVED

    def _zero(self, new: Mapping[str, Any]) -> None:
        """Revise the DeepSpeed settings that a file holds or names; without any, the file names memfit's own."""
        key = self.own.deepspeed
        if not key or at(new, key) != process_layout.DEEPSPEED_FILE:
            return
        present = at(self.source.data, key)
        if isinstance(present, Mapping):
            inner = self._of_deepspeed(present).found()
            self.values.pop(key, None)
            for path, value in inner.values.items():
                self.set((*key, *path), value, inner.why[path])
            return
        found = local(present, self.source.path.parent, Path())
        text = read_text(found) if found is not None and found.is_file() else ""
        if found is not None and is_json(text):
            inner = self._of_deepspeed(parsed(text, found)).found()
            if inner.values:
                self.files[process_layout.DEEPSPEED_FILE] = edited(text, inner.source.data, inner.values)
                self.set(key, process_layout.DEEPSPEED_FILE, f"{_words(inner)} in it")
            else:
                self.set(key, str(found.resolve()), MOVED)
            return
        plain, recipe = self._of_deepspeed({}), self.plan.recipe
        same = present and plain._written(self.steps[0][1]) == plain._written(recipe)
        if not same or key in self.values:
            self.files[process_layout.DEEPSPEED_FILE] = deepspeed.text(recipe)
            why = next((title for title, r in self.steps if r.shard == recipe.shard and title), ASKED)
            self.set(key, process_layout.DEEPSPEED_FILE, self.why.get(key, why))

    def _of_deepspeed(self, data: Mapping[str, Any]) -> FileRevision:
        """Return an empty revision of DeepSpeed settings."""
        return FileRevision(OWN[deepspeed.NAME], self.plan, self.steps, replace(self.source, data=data), self.anew)


_LEAFWISE = ("accelerator_config", "model_init_kwargs")  # mappings that hold more than memfit's keys


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the settings that differ, with the new value or REMOVED; a mapping that is gone goes as a whole."""
    for name in (*old, *(n for n in new if n not in old)):
        before, after = old.get(name), new.get(name)
        if isinstance(after, Mapping) and after:
            yield from _difference(before if isinstance(before, Mapping) else {}, after, (*above, name))
        elif name not in new and name in _LEAFWISE and isinstance(before, Mapping):
            yield from _difference(before, {}, (*above, name))
        elif name not in new or before != after:
            yield (*above, name), after if name in new else REMOVED


def _as_in_file(path: KeyPath, data: Mapping[str, Any]) -> KeyPath:
    """Return the path with or without the prefix `fsdp_`, as the keys of the file's FSDP block have it."""
    if path[0] != accelerate.FSDP or len(path) < 2 or not isinstance(block := data.get(accelerate.FSDP), Mapping):
        return path
    plain = str(path[1]).removeprefix("fsdp_")
    if plain == path[1]:  # axolotl and transformers take both
        return (path[0], f"fsdp_{plain}" if f"fsdp_{plain}" in block else plain, *path[2:])
    return path


def local(value: object, *folders: Path) -> Path | None:
    """Return the file or folder that a setting names, from the first of the folders that has it."""
    if not isinstance(value, str) or not value:
        return None
    try:
        named = Path(value).expanduser()
        return next((path for folder in folders if (path := folder / named).exists()), None)
    except (OSError, RuntimeError, ValueError):  # too long, an unknown user's home, a zero byte
        return None


def _move(made: FileRevision, adopted: Adopted) -> list[str]:
    """Set a model or data that the user named beside the file, and make paths absolute: the file moves.

    Returns what was named and has no key in the file, as in the arguments of a script of the user.
    """
    own, source, job = made.own, made.source, made.plan.job
    unsaid, settings = list[str](), dict[str, Any]()
    model, beside, here = job.architecture.name, source.path.parent, Path()
    if own.model and at(source.data, own.model) is not None and model != at(source.data, own.model):
        made.set(own.model, model, MOVED if local(model, here) else ASKED)
    same = (None, "", adopted.data, _absolute(adopted.data, here, beside))
    if own.data and job.dataset not in same:
        settings, more = own.data(made.plan)
        if own.name or set(settings) <= set(source.data):
            made.files.update(more)
            for name, value in settings.items():
                made.set((name,), value, ASKED)
        else:
            unsaid.append(f"data {job.dataset}")
    if own.start:  # of one file that says the model in words of its own, and names what says the data
        unsaid += _beside_the_file(made.plan, adopted)
    for path, place in own.files(source.data, source.path).items() if own.files else ():
        made.set(path, place, MOVED)
    info = local(f"data/{llamafactory.INFO_FILE}", beside, here)
    if adopted.format == llamafactory.NAME and info and "dataset_dir" not in {*source.data, *settings}:
        made.set(("dataset_dir",), str(info.parent.resolve()), MOVED)
    for path, value in _paths(source.data):
        folders = (beside, here) if path == ("dataset_dir",) else (here, beside)  # where each is looked for
        found = _absolute(value, *folders)
        if found != value and path not in made.values and path[:1] not in made.values:
            made.set(path, found, MOVED)
    return unsaid


def _beside_the_file(plan: Plan, adopted: Adopted) -> list[str]:
    """Return model, data and images that the user named, which a file of an image trainer has otherwise."""
    job, given = plan.job, adopted.shape
    model, own = job.architecture.name, (adopted.model, _absolute(adopted.model, Path()))
    said = (
        (adopted.model and model not in own, f"model {model}"),
        (job.dataset, f"data {job.dataset}"),
        (any(given.image) and job.shape.image != given.image, "images of {} x {}".format(*job.shape.image)),
        (given.cached and not job.shape.cached, "images and texts encoded in each step"),
    )
    return [what for other, what in said if other]


def _absolute(value: object, *folders: Path) -> object:
    found = local(value, *folders)
    return value if found is None or Path(str(value)).is_absolute() else str(found.resolve())


def _paths(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, object]]:
    """Yield the settings that may name files of the user."""
    for name in ("dataset_name", "dataset_dir", "chat_template_path"):
        if name in data:
            yield (name,), data[name]
    for name in (axolotl.DATASETS, "test_datasets"):
        entries = data.get(name)
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, Mapping):
                yield (name, i, "path"), entry.get("path")


# ---- what is said of it


def _unsaid(plan: Plan, first: Recipe, name: str, files: Mapping[str, str]) -> list[str]:
    """Return the fields of the recipe that the plan changed and that are not read back from the files."""
    with tempfile.TemporaryDirectory() as folder:
        for file, text in files.items():
            (Path(folder) / file).write_text(text, encoding="utf-8")
        try:
            found = adopt(Path(folder) / name).recipe
        except MemfitError:
            return ["the recipe"]
    wanted = plan.recipe
    changed = [field for field in RECIPE_FIELDS if getattr(first, field) != getattr(wanted, field)]
    return [
        f"{field} {getattr(wanted, field)}"
        for field in changed
        if field not in _NOT_IN_FILES and not _same(field, found, wanted, plan)
    ]


def _same(field: str, found: Recipe, wanted: Recipe, plan: Plan) -> bool:
    """Return whether a field means the same in two recipes, even where its values differ."""
    if getattr(found, field) == getattr(wanted, field) or (
        wanted.method == "full" and field.startswith(("lora_", "modules_"))
    ):
        return True
    if field == "precision":
        kind = process_layout.backend(wanted)
        return meaning(wanted.but(precision=found.precision), kind) == meaning(wanted, kind)
    if field == "loading":
        return loading_of(found) == loading_of(wanted)
    if field == "shard":
        return process_layout.zero_stage(found) == process_layout.zero_stage(wanted)
    if field == "lora_targets":
        modules = [names.targets(recipe, plan.job.architecture) for recipe in (found, wanted)]
        return modules[0] == modules[1]
    return False


def _words(made: FileRevision) -> str:
    """Return 'micro_batch_size 4 -> 2 (tuned); optimizer "adamw" -> "adamw_8bit" (8-bit AdamW, saves 3 GiB)'."""
    by_reason: dict[str, list[str]] = {}
    for path, value in made.values.items():
        before, name = at(made.source.data, path), ".".join(str(part) for part in path)
        new = "removed" if value is REMOVED else _shown(value) if before is None else f"-> {_shown(value)}"
        text = f"{name} {new}" if before is None else f"{name} {_shown(before)} {new}"
        by_reason.setdefault(made.why[path], []).append(text)
    return "; ".join(f"{', '.join(texts)} ({why})" for why, texts in by_reason.items())


def _shown(value: object) -> str:
    if isinstance(value, Mapping) or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
        return "{...}" if isinstance(value, Mapping) else "[...]"
    return json.dumps(value, ensure_ascii=False)[:200]


def _without_head(text: str) -> str:
    """Return the text without the lines that memfit put above and behind the keys of a file it wrote."""
    if not _HEAD.match(text):
        return text
    return _SAVED.sub("", _HEAD.sub("", text, count=1))
