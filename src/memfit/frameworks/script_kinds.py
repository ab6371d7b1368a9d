"""The table of what the training scripts of each task have of their own; a task without a row has no script."""

from __future__ import annotations

from memfit.errors import Unsupported
from memfit.frameworks import script_media, script_preferences, script_texts
from memfit.frameworks.script_data import SFT, ScriptKind
from memfit.tables.tasks import TASKS

# by the kind of a task's sample; a task whose script differs from others of its kind has a row of its own
KINDS: dict[str, ScriptKind] = {
    "sft": SFT,
    "text": script_texts.MASKED,
    "label": script_texts.LABEL,
    "token-labels": script_texts.TOKEN_LABELS,
    "text-to-text": script_texts.PAIRS,
    "image": script_media.IMAGE,
    "features": script_media.FEATURES,
    "waveform": script_media.WAVEFORM,
    "pair": script_preferences.REWARD,
    "choice": script_preferences.CHOICE,
    "kto": script_preferences.ANSWERS,
}


# tasks that train on samples of a kind that has a script, which theirs would not be
_WITHOUT = ("pretrain", "orpo")


def has_script(task: str) -> bool:
    """Return whether memfit writes a script for a task."""
    return task not in _WITHOUT and (task in KINDS or TASKS[task].sample in KINDS)


def kind_of(task: str, target: str) -> ScriptKind:
    """Return the row of a task. Raises Unsupported for one without a script, or whose trainer is not the target's."""
    row = TASKS[task]
    own = "transformers" if row.trainer == "transformers" else "trl"
    if not has_script(task):
        raise Unsupported(f"memfit writes no script for {row.title}", hint="memfit trace train.py runs your own script")
    if target != own and task != "sft":
        raise Unsupported(f"{target} does not run {row.title}", hint=f"--target {own}")
    return KINDS.get(task) or KINDS[row.sample]
