"""The table of what the training scripts of each task have of their own."""

from __future__ import annotations

from memfit.errors import Unsupported
from memfit.frameworks import script_media, script_pictures, script_preferences, script_texts
from memfit.frameworks.script_data import SFT, SFT_TOKENS, ScriptKind
from memfit.tables.tasks import TASKS

# by the kind of a task's sample; a task whose script differs from others of its kind has a row of its own
KINDS: dict[str, ScriptKind] = {
    "sft": SFT,
    "pretrain": script_texts.PRETRAIN,
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
    "prompt": script_preferences.PROMPT,
    "pictures": script_pictures.PICTURES,
    "anchor": script_texts.ANCHOR,
}


def kind_of(task: str, target: str) -> ScriptKind:
    """Return the row of a task. Raises Unsupported where its trainer is not the target's."""
    row = TASKS[task]
    if task == "sft" and target == "transformers":
        return SFT_TOKENS
    if target != row.target and task != "sft":
        raise Unsupported(f"{target} does not run {row.title}", hint=f"--target {row.target}")
    return KINDS.get(task) or KINDS[row.sample]
