"""Training (rate, schedule, evaluation, checkpoints, special tokens) in the keys of each framework: read and written.

Defaults are those of axolotl 0.19 (core/builders/base.py, utils/config/__init__.py), LLaMA-Factory 0.9.5,
transformers 5.23 and TRL 1.16. A file's own default is read like a stated value where frameworks differ in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from memfit.errors import BadInput
from memfit.frameworks.keys import at
from memfit.nouns.job import AS_USUAL, Interval, Training, check_training

# fields that have the same name in every framework: all of them pass these on to TrainingArguments
_SAME = (
    "learning_rate", "max_steps", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "seed",
    "save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps",
)  # fmt: skip
TOKENS = ("pad_token", "eos_token", "bos_token")
SPECIAL_TOKENS = "special_tokens"  # axolotl's mapping of them
_OF_TRAINER = {"epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type"}
_TRAINER = Training(learning_rate=5e-5, epochs=3.0, lr_scheduler="linear", warmup=0.0)
WARMUP = ("warmup_steps", "warmup_ratio")  # of axolotl and LLaMA-Factory; transformers 5.23 has only the first


@dataclass(frozen=True, slots=True)
class TrainingNames:
    """How a framework's file says Training: its names, where they differ, and its defaults."""

    names: Mapping[str, str] = field(default_factory=dict)  # field -> key, beside _SAME
    defaults: Training = AS_USUAL
    warmup: tuple[str, str] = WARMUP  # keys of a number of steps and of a share
    tokens: tuple[str, ...] = ()  # tokens that have a key of their own


DIALECTS: dict[str, TrainingNames] = {
    "axolotl": TrainingNames(
        {"epochs": "num_epochs", "lr_scheduler": "lr_scheduler", "eval_share": "val_set_size"},
        Training(lr_scheduler="cosine", warmup=0.03, save_strategy="epoch"),
    ),
    "llamafactory": TrainingNames(_OF_TRAINER | {"eval_share": "val_size"}, _TRAINER),
    "ms-swift": TrainingNames(
        _OF_TRAINER | {"eval_share": "split_dataset_ratio"},
        replace(_TRAINER, learning_rate=1e-4, lr_scheduler="cosine", weight_decay=0.1, adam_beta2=0.95),
    ),
    "transformers": TrainingNames(_OF_TRAINER, _TRAINER, (WARMUP[0], WARMUP[0])),
    "trl": TrainingNames(
        _OF_TRAINER, replace(_TRAINER, learning_rate=2e-5), (WARMUP[0], WARMUP[0]), ("pad_token", "eos_token")
    ),
}  # fmt: skip
# settings of a DeepSpeed JSON that must equal those of the Trainer
_DEEPSPEED = {
    "learning_rate": (("scheduler", "params", "warmup_max_lr"), ("optimizer", "params", "lr")),
    "weight_decay": (("optimizer", "params", "weight_decay"),),
    "adam_epsilon": (("optimizer", "params", "eps"),),
    "max_grad_norm": (("gradient_clipping",),),
}


# ---- reading


def read(data: Mapping[str, Any], framework: str) -> tuple[Training, frozenset[str]]:
    """Return what a file says on training, and the keys that say it; values that make no sense are left out."""
    if framework == "deepspeed":
        return _read_deepspeed(data), frozenset(("optimizer", "scheduler", "gradient_clipping"))
    if framework not in DIALECTS:
        return AS_USUAL, frozenset()
    dialect, used = DIALECTS[framework], set[str]()
    found = dialect.defaults
    names = {name: name for name in _SAME} | dict(dialect.names) | {name: name for name in dialect.tokens}
    for name, key in names.items():
        found, taken = _with(found, name, data.get(key))
        used |= {key} if taken or data.get(key) in (0, -1) else set()
    for key in (*WARMUP[::-1], dialect.warmup[0]):  # a number of steps wins over a share
        found, taken = _with(found, "warmup", data.get(key))
        used |= {key} if taken else set()
    if framework == "axolotl":
        found = _read_axolotl(data, found, used)
    return found, frozenset(used)


def _with(training: Training, name: str, value: object) -> tuple[Training, bool]:
    """Return the training with a field as a file has it, and whether its value could be used."""
    usual = getattr(AS_USUAL, name)
    if isinstance(value, str) and not isinstance(usual, str):
        try:
            value = float(value)  # YAML 1.1 reads 2e-4 as text
        except ValueError:
            return training, False
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(usual, str):
        fits = isinstance(value, str) and (not name.endswith("_strategy") or value in get_args(Interval))
    else:
        fits = number and (isinstance(usual, float) or value == int(value))  # type: ignore[call-overload]
    if not fits:
        return training, False
    try:
        return check_training(replace(training, **{name: type(usual)(value)})), True
    except (BadInput, OverflowError):
        return training, False


def _read_axolotl(data: Mapping[str, Any], found: Training, used: set[str]) -> Training:
    """Return the training with axolotl's counts per epoch, which it turns into shares of all steps, and its tokens."""
    if found.save_steps:
        found = replace(found, save_strategy="steps")
    for kind in ("save", "eval"):
        key = f"{kind}s_per_epoch"
        if not isinstance(data.get(key), int | float) or not data[key] > 0:
            continue
        used.add(key)
        share = 1 / (data[key] * found.epochs)
        strategy, steps = ("steps", share) if share < 1 else ("epoch", 0.0)
        timing: dict[str, Any] = {f"{kind}_strategy": strategy, f"{kind}_steps": steps}
        found = replace(found, **timing)
    tokens = data.get(SPECIAL_TOKENS)
    if isinstance(tokens, Mapping):
        for name in TOKENS:
            found, _ = _with(found, name, tokens.get(name))
        if set(tokens) <= set(TOKENS):
            used.add(SPECIAL_TOKENS)
    return found


def _read_deepspeed(data: Mapping[str, Any]) -> Training:
    found = AS_USUAL
    for name, paths in _DEEPSPEED.items():
        for path in paths:
            found, _ = _with(found, name, at(data, path))
    betas = at(data, ("optimizer", "params", "betas"))
    if isinstance(betas, list) and len(betas) == 2:
        for name, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            found, _ = _with(found, name, value)
    return found


# ---- writing


def write(training: Training, framework: str) -> dict[str, Any]:
    """Return the settings of a framework's file that are not as usual, except the rate, the length and the data."""
    dialect = DIALECTS[framework]
    names = {name: name for name in _SAME} | dict(dialect.names) | {name: name for name in dialect.tokens}
    told = {f.name: getattr(training, f.name) for f in fields(Training) if f.name in names}
    told |= _evaluation(training)
    changed = {
        names[name]: whole(value)
        for name, value in told.items()
        if value != getattr(AS_USUAL, name) and name not in ("learning_rate", "epochs", "max_steps")
    }
    if training.warmup >= 0:
        changed[dialect.warmup[0 < training.warmup < 1]] = whole(training.warmup)
    if framework == "axolotl":
        tokens = {name: getattr(training, name) for name in TOKENS if getattr(training, name)}
        changed |= {SPECIAL_TOKENS: tokens} if tokens else {}
    return changed


def _evaluation(training: Training) -> dict[str, Any]:
    """Return when to evaluate: as said, else whenever a checkpoint is saved."""
    if not (training.eval_data or training.eval_share):
        return {"eval_strategy": "", "eval_steps": 0.0}
    strategy = training.eval_strategy or ("steps" if training.eval_steps else training.save_strategy or "steps")
    steps = training.eval_steps or training.save_steps or 500
    return {"eval_strategy": strategy, "eval_steps": steps if strategy == "steps" else 0.0}


def whole(value: Any) -> Any:
    """Return a whole float as an int, 1 for 1.0, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def not_said(training: Training, framework: str) -> tuple[str, ...]:
    """Return the fields of `training` that a framework's file has no key for."""
    if framework == "llamafactory":
        return tuple(name for name in TOKENS if getattr(training, name))
    return ()
