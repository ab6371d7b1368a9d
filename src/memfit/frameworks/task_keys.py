"""Which task another tool's file trains, and which of its keys change no memory once that task is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from memfit.frameworks.keys import Adopted, is_off, word, words

Data = Mapping[str, Any]
# losses that are computed from the log-probabilities of answers, with a reference model (trl 1.16, DPOConfig.loss_type)
_LOSSES = words(
    "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired aot_pair apo_zero"
    " apo_down discopop cdpo"
)
_ANY = ("*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKeys:
    """One row: a task as a framework's file says it.

    `keys`: those of the task, and the values with which they change no memory of it beside what the task's trainer
    takes; what is off changes none either.
    """

    task: str
    named_by: str  # the key that says it: who ignores it has the file judged as supervised fine-tuning
    says: Callable[[Data], bool]
    keys: Mapping[str, tuple[str, ...]]
    own_loop: bool = False  # the framework's own code computes the loss, and keeps more than TRL's: see the row


def _is(key: str, *values: str) -> Callable[[Data], bool]:
    return lambda data: word(data.get(key)) in values


def _has(*names: str) -> Callable[[Data], bool]:
    return lambda data: any(name in data for name in names) and not _generates(data)


def _generates(data: Data) -> bool:
    """Return whether a file of TRL is one of a trainer that samples answers, or has a teacher or another loss."""
    others = words(
        "num_generations* use_vllm vllm_* max_completion_length teacher_model* response_length num_ppo_epochs lmbda"
        " cpo_alpha simpo_gamma orpo_alpha reward_model_path sft_model_path"
    )
    return any(fnmatchcase(name, pattern) for name in data for pattern in others)


def _trl_dpo(data: Data) -> bool:
    marks = ("precompute_ref_log_probs", "f_divergence_type", "reference_free", "discopop_tau", "rpo_alpha")
    return _has(*marks)(data) or ("beta" in data and _is("loss_type", *_LOSSES)(data) and not _generates(data))


_TRL_DPO = dict.fromkeys(
    words("beta label_smoothing max_prompt_length disable_dropout f_divergence_type f_alpha_divergence_coef"
          " discopop_tau truncation_mode model_adapter_name ref_adapter_name"), _ANY
)  # fmt: skip
_TRL: tuple[TaskKeys, ...] = (
    TaskKeys(task="kto", named_by="desirable_weight", says=_has("desirable_weight", "undesirable_weight"),
             keys=_TRL_DPO | dict.fromkeys(("desirable_weight", "undesirable_weight"), _ANY)
             | {"loss_type": ("kto", "apo_zero_unpaired")}),
    TaskKeys(task="reward", named_by="center_rewards_coefficient", says=_has("center_rewards_coefficient"),
             keys=dict.fromkeys(("center_rewards_coefficient", "disable_dropout"), _ANY)),
    TaskKeys(task="dpo", named_by="beta", says=_trl_dpo, keys=_TRL_DPO | {"loss_type": _LOSSES}),
)  # fmt: skip
# LLaMA-Factory 0.9.5: hparams/finetuning_args.py; orpo and simpo have no reference model, ref_model is another one. Its
# trainers (train/dpo, kto and rm, trainer.py) keep the logits of all tokens, in fp32, where TRL's have a fused head or
# none
_LLAMAFACTORY: tuple[TaskKeys, ...] = (
    TaskKeys(task="dpo", named_by="stage", own_loop=True, says=lambda data: word(data.get("stage")) == "dpo"
             and word(data.get("pref_loss", "sigmoid")) not in ("orpo", "simpo"),
             keys={"stage": _ANY, "pref_loss": ("sigmoid", "hinge", "ipo", "kto_pair"), "pref_ftx": (),
                   "pref_bco_weight": (), "ref_model": (), "ref_model_adapters": ()}),
    TaskKeys(task="reward", named_by="stage", own_loop=True, says=_is("stage", "rm"), keys={"stage": _ANY}),
    TaskKeys(task="kto", named_by="stage", own_loop=True, says=_is("stage", "kto"),
             keys={"stage": _ANY, "pref_ftx": (), "ref_model": ()}),
)  # fmt: skip
# axolotl 0.19: utils/schemas/enums.py (RLType), core/trainers/dpo/trainer.py; its trainers leave the loss to TRL
_AXOLOTL: tuple[TaskKeys, ...] = (
    TaskKeys(task="dpo", named_by="rl", says=_is("rl", "dpo", "ipo"),
             keys={"rl": _ANY, "precompute_ref_log_probs": (), "dpo_use_weighting": (), "dpo_padding_free": (),
                   "rpo_alpha": ()}),
    TaskKeys(task="kto", named_by="rl", says=_is("rl", "kto"), keys={"rl": _ANY}),
    TaskKeys(task="reward", named_by="reward_model", says=lambda data: bool(data.get("reward_model")),
             keys={"reward_model": _ANY}),
)  # fmt: skip
# ms-swift 4.6: arguments/rlhf_args.py; its trainers keep the logits of all answers (rlhf_trainers/dpo_trainer.py)
_SWIFT: tuple[TaskKeys, ...] = (
    *(TaskKeys(task=task, named_by="rlhf_type", own_loop=True, says=_is("rlhf_type", said),
               keys={"rlhf_type": _ANY, "beta": _ANY, "rpo_alpha": (), "ref_model": (), "ref_adapters": ()})
      for task, said in (("orpo", "orpo"), ("reward", "rm"), ("kto", "kto"), ("dpo", "dpo"))),
    TaskKeys(task="classification", named_by="task_type", says=_is("task_type", "seq_cls"), keys={"task_type": _ANY}),
    TaskKeys(task="embedding", named_by="task_type", says=_is("task_type", "embedding"), keys={"task_type": _ANY}),
)  # fmt: skip
ROWS: dict[str, tuple[TaskKeys, ...]] = {
    "transformers": _TRL, "llamafactory": _LLAMAFACTORY, "axolotl": _AXOLOTL, "ms-swift": _SWIFT,
}  # fmt: skip


def task_of(format: str, data: Data) -> str:
    """Return the task of a file; "sft" where it names none that memfit has."""
    return next((row.task for row in ROWS.get(format, ()) if row.says(data)), "sft")


def ignored(adopted: Adopted, ignore: Collection[str]) -> bool:
    """Return whether the user wants a file to be judged without what says its task."""
    row = _row(adopted, adopted.task)
    return row is not None and row.named_by in ignore


def own_loop(adopted: Adopted, task: str) -> bool:
    """Return whether the file's tool computes the loss of the task itself, and keeps more than TRL's trainer."""
    row = _row(adopted, task)
    return row is not None and row.own_loop


def _row(adopted: Adopted, task: str) -> TaskKeys | None:
    return next((row for row in ROWS.get(adopted.format, ()) if row.task == task), None)


def own_keys(adopted: Adopted, task: str) -> tuple[str, ...]:
    """Return the keys of a file that are the task's alone and neither off nor its name: no written script has them."""
    row = _row(adopted, task)
    if row is None or adopted.source is None:
        return ()
    data = adopted.source.data
    names = {row.named_by} if isinstance(data.get(row.named_by), str) else set()
    return tuple(key for key in row.keys if key in data and not is_off(data[key]) and key not in names)


def tasks_of(adopted: Adopted, unknown: Collection[str]) -> tuple[str, ...]:
    """Return the tasks that have all keys of a file that supervised fine-tuning does not have, dpo first."""
    rows = [row.task for row in reversed(ROWS.get(adopted.format, ()))]
    return tuple(task for task in rows if unknown and not set(unknown) & {*unknown_for(adopted, task)})


def unknown_for(adopted: Adopted, task: str, by_trl: bool = True) -> tuple[str, ...]:
    """Return the keys of a file that may change memory in a plan of the task, which TRL or the file's tool trains."""
    row = _row(adopted, task)
    if row is None or adopted.source is None:
        return adopted.unknown
    data = adopted.source.data

    def fine(key: str) -> bool:
        return is_off(data.get(key)) or row.keys[key] == _ANY or word(data.get(key)) in row.keys[key]

    said = [key for key in adopted.unknown if key not in data or not is_off(data[key])]
    left = [key for key in said if key not in row.keys or not fine(key)]
    left += [row.named_by] if row.own_loop and not by_trl else []
    return tuple(dict.fromkeys((*left, *(key for key in row.keys if key in data and not fine(key)))))
