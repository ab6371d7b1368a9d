"""Parts of the training scripts: head, constants, arguments, settings, main(), and requirements.txt."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import memfit.frameworks.names as names
from memfit._package import __version__
from memfit.frameworks import process_layout, training_keys
from memfit.frameworks.script_data import ScriptKind as ScriptKind
from memfit.frameworks.script_data import Setting as Setting
from memfit.frameworks.script_data import data_text
from memfit.frameworks.text import WIDTH, comment, literal, summary
from memfit.frameworks.training_keys import whole
from memfit.nouns.job import AS_USUAL, Recipe, Training
from memfit.nouns.plan import Plan
from memfit.nouns.task import Task
from memfit.tables.adapters import adapter
from memfit.tables.optimizers import optimizer as optimizer_row
from memfit.tables.tasks import TASKS
from memfit.units import several

NO_DATA = "data.jsonl"
DATA_HELP = "a file, or a dataset on the Hub"


def opening(
    plan: Plan, how: process_layout.Launch, what: str, versions: str, kind: ScriptKind,
    imports: Mapping[str, Iterable[str]], saved: dict[str, str],
) -> list[str]:  # fmt: skip
    """Return the script's lines above a framework's functions: docstring, imports, constants, arguments().

    `imports`: names that the framework's part uses, by module, beside those of the kind.
    """
    training = plan.job.training
    unusual = _unusual(training)
    return [
        *_head(plan, what, versions, how, kind),
        *_imports(plan, kind, imports),
        *_constants([*_sizes(plan, saved, kind), *unusual.values(), *_of_the_data(training)]),
        *_adapters(plan, saved, how.backend),
        *("", ""),
        *_ARGUMENTS.format_map(_USUAL | {name: row[0] for name, row in unusual.items()}).splitlines(),
    ]


_HEAD = '''\
"""{title} {model} with {what}.

{prediction}; the recipe is in recipe.toml.
Written by memfit {version} for {versions}.

    pip install -r requirements.txt
    {command}

The data is a .jsonl, .json, .csv, .tsv, .parquet or .txt file, or a dataset on the Hub, whose rows {holds}.
"""

'''


def _head(plan: Plan, what: str, versions: str, how: process_layout.Launch, kind: ScriptKind) -> list[str]:
    """Return the docstring of the script, with the prediction and the two commands to type."""
    line, row = summary(plan), task_of(plan)
    return _HEAD.format(
        title="Fine-tune" if row.key == "sft" else f"{row.title[:1].upper()}{row.title[1:]}:", holds=kind.holds,
        model=comment(plan.job.architecture.title), what=what, prediction=f"{line[:1].upper()}{line[1:]}",
        version=__version__, versions=versions,
        command=f"{how.command}{'' if plan.job.dataset or how.started_by else f' --data {NO_DATA}'}",
    ).splitlines()  # fmt: skip


def task_of(plan: Plan) -> Task:
    """Return the row of the plan's task."""
    return TASKS[plan.job.task]


def _imports(plan: Plan, kind: ScriptKind, more: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the imports. PYTORCH_ALLOC_CONF is set before torch is imported, which reads it once."""
    needed: dict[str, set[str]] = {module: set() for module in ("argparse", "csv", "json")}
    needed |= {"os": set()} if plan.recipe.alloc_conf else {}
    needed |= {"pathlib": {"Path"}, "datasets": {"Dataset", "Value", "load_dataset"}}
    for module, found in (*kind.imports.items(), *more.items()):
        needed.setdefault(module, set()).update(found)
    own = [module for module in needed if module.partition(".")[0] in sys.stdlib_module_names]
    lines = [*_lines({module: needed.pop(module) for module in own}), ""]
    imports = _lines(needed)
    if not plan.recipe.alloc_conf:
        return [*lines, *imports, ""]
    why = "before torch is imported, which reads it once"
    setting = f'os.environ.setdefault("PYTORCH_ALLOC_CONF", {literal(plan.recipe.alloc_conf)})'
    return ["# ruff: noqa: E402", *lines, *with_comment(setting, why), "", *imports, ""]


def _lines(needed: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the imports of a section: whole modules first."""
    ordered = sorted(needed, key=lambda module: (bool(needed[module]), module.lower()))
    return [line for module in ordered for line in _import(module, needed[module])]


def _import(module: str, names: Iterable[str]) -> list[str]:
    """Return the lines of an import, sorted as ruff sorts them; without names the module itself."""
    found = sorted(names, key=lambda name: (not name.isupper(), name[:1].islower(), name))
    if not found:
        return [f"import {module}"]
    line = f"from {module} import {', '.join(found)}"
    return [line] if len(line) <= WIDTH else [f"from {module} import (", *(f"    {name}," for name in found), ")"]


def with_comment(code: str, note: str, indent: str = "") -> list[str]:
    """Return a line of code with its comment behind it, or above it when the line would be too long."""
    line = indent + code
    if not note:
        return [line]
    together = f"{line}  # {note}"
    return [together] if len(together) <= WIDTH else [f"{indent}# {note}", line]


def _constants(settings: Iterable[Setting]) -> list[str]:
    """Return lines of NAME = value  # comment."""
    return [line for name, value, note in settings for line in with_comment(f"{name} = {value}", note)]


def call(opening: str, settings: Iterable[Setting], closing: str = ")", indent: str = "    ") -> list[str]:
    """Return a call with one keyword argument per line."""
    inner = indent + "    "
    body = [line for name, value, note in settings for line in with_comment(f"{name}={value},", note, inner)]
    return [indent + opening, *body, indent + closing]


def assign(name: str, function: str, settings: dict[str, object], note: str = "") -> list[str]:
    """Return NAME = Function(...), on one line where it fits."""
    line = f"{name} = {function}({', '.join(f'{k}={literal(v)}' for k, v in settings.items())})"
    if len(line) <= WIDTH:
        return with_comment(line, note)
    return [
        *([f"# {note}"] if note else []),
        f"{name} = {function}(",
        *(line for k, v in settings.items() for line in _argument(k, v)),
        ")",
    ]


def _argument(name: str, value: object) -> list[str]:
    """Return NAME=value as a line of a call, with a list over several where it is long."""
    line = f"    {name}={literal(value)},"
    if len(line) <= WIDTH or not isinstance(value, list):
        return [line]
    return [f"    {name}=[", *(f"        {literal(one)}," for one in value), "    ],"]


def _sizes(plan: Plan, saved: dict[str, str], kind: ScriptKind) -> list[Setting]:
    """Return the constants of every script: model, data, sizes."""
    r = plan.recipe
    product = f"{r.micro_batch} x {r.accumulation} x {several(r.num_gpus, 'GPU')}"
    step = f"{product} = {r.effective_batch} {task_of(plan).unit} per optimizer step"
    return [
        ("MODEL", literal(plan.job.architecture.name), ""),
        ("DATA", literal(plan.job.dataset or NO_DATA), ""),
        *kind.sizes(plan),
        ("MICRO_BATCH", str(r.micro_batch), saved.get("micro_batch", "")),
        ("ACCUMULATION", str(r.accumulation), step),
        ("LEARNING_RATE", learning_rate(plan), "this and EPOCHS do not change memory"),
        ("EPOCHS", literal(whole(plan.job.training.epochs)), ""),
    ]


def _unusual(training: Training) -> dict[str, Setting]:
    """Return, for each training option that the job sets, the constant that becomes its default."""
    notes = {
        "max_steps": "optimizer steps, whatever EPOCHS says",
        "save_steps": "between checkpoints; below 1 a share of all steps",
        "eval_data": "evaluated at every checkpoint",
    }
    changed = {name: getattr(training, name) for name in notes if getattr(training, name) != getattr(AS_USUAL, name)}
    return {name: (name.upper(), literal(whole(value)), notes[name]) for name, value in changed.items()}


def _of_the_data(training: Training) -> list[Setting]:
    """Return the constants of what is held out and of special tokens, where the job sets them."""
    tokens = {name: getattr(training, name) for name in training_keys.TOKENS if getattr(training, name)}
    share = literal(whole(training.eval_share))
    return [
        *([("EVAL_SHARE", share, "of the data, held out for evaluation")] if training.eval_share else []),
        *([("TOKENS", literal(tokens), "instead of the tokenizer's own")] if tokens else []),
    ]


def _adapters(plan: Plan, saved: dict[str, str], kind: process_layout.Backend) -> list[str]:
    """Return the constants QUANTIZATION and ADAPTER, if the recipe needs them."""
    recipe, lines = plan.recipe, []
    if recipe.quantization != "none":
        settings = names.bitsandbytes(recipe)
        if recipe.shard == "parameters":  # uint8 storage, the default, would leave every card with the whole base
            settings["bnb_4bit_quant_storage"] = process_layout.numbers(recipe, kind).weights
        if new := task_of(plan).new_modules:
            settings["llm_int8_skip_modules"] = list(new)  # of 4 bits too
        lines += assign("QUANTIZATION", "BitsAndBytesConfig", settings, saved.get("quantization", ""))
    if recipe.method != "full":
        row, kind_of = task_of(plan), adapter(recipe.adapter)
        words: dict[str, object] = names.adapter_words(recipe, plan.job.architecture)
        whole = [*recipe.modules_to_save, *([row.head] if row.head and kind_of.targets != "none" else [])]
        words |= {"modules_to_save": whole} if whole else {}
        words |= {"task_type": row.peft} if row.peft else {}
        lines += assign("ADAPTER", kind_of.config, words, saved.get("method", ""))
    return lines


def learning_rate(plan: Plan) -> str:
    """Return the learning rate as source text: the job's, else TRL's default, and for adapters ten times that."""
    usual = task_of(plan).rates[plan.recipe.method != "full"]
    return repr(plan.job.training.learning_rate) if plan.job.training.learning_rate else usual


_USUAL = {"max_steps": "-1", "save_steps": "500", "eval_data": "None"}
_ARGUMENTS = f'''\
def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", default=DATA, help="{DATA_HELP}")
    parser.add_argument("--eval-data", default={{eval_data}}, help="the same for evaluation, at every checkpoint")
    parser.add_argument("--output", default="output")
    resume = parser.add_argument("--resume", nargs="?", const=True, action="append", default=[])
    resume.help = "from the last checkpoint in --output, or a named one"
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--max-steps", type=int, default={{max_steps}})
    parser.add_argument("--save-steps", type=float, default={{save_steps}}, help="below 1: a share of all steps")
    parser.add_argument("--cpu", action="store_true", help="try the script without a GPU")
    return parser.parse_args(words)


'''


# settings of TrainingArguments that every script has, at its beginning and at its end
FIRST: tuple[Setting, ...] = (
    ("output_dir", "args.output", ""),
    ("max_steps", "args.max_steps", ""),
    ("num_train_epochs", "args.epochs", ""),
    ("learning_rate", "args.learning_rate", ""),
)


def last(training: Training) -> list[Setting]:
    """Return the settings at the end of every script: schedule, evaluation, checkpoints, device."""
    told = training_keys.write(training, "transformers")
    when = told.pop("eval_strategy", training.eval_strategy or training.save_strategy or "steps")
    for name in ("save_steps", "eval_steps"):  # an argument of the script, and by default the same
        told.pop(name, None)
    strategy = literal(when) if training.eval_share else f'{literal(when)} if args.eval_data else "no"'
    return [
        *((name, literal(value), "") for name, value in told.items() if name != "save_total_limit"),
        ("per_device_eval_batch_size", "MICRO_BATCH", ""),
        ("eval_strategy", strategy, ""),
        ("eval_steps", literal(whole(training.eval_steps)) if training.eval_steps else "args.save_steps", ""),
        ("prediction_loss_only", "True", "evaluation keeps no logits"),
        ("save_steps", "args.save_steps", ""),
        ("save_total_limit", str(training.save_total_limit or 2), ""),
        ("use_cpu", "args.cpu", ""),
    ]


def samples(training: Training) -> list[str]:
    """Return the line of build() that reads the data, and splits it where a share is held out."""
    return [
        "    samples, held_out = split(load(args.data))" if training.eval_share else "    samples = load(args.data)"
    ]


def held_out(training: Training, made: str = "{}") -> str:
    """Return the source text of the evaluation data; `made` wraps samples into what the trainer takes."""
    without = made.format("held_out") if training.eval_share else "None"
    return f"{made.format('load(args.eval_data)')} if args.eval_data else {without}"


def rejoins(plan: Plan, kind: process_layout.Backend) -> bool:
    """Return whether the script must join experts itself on resuming (issue 48805 of transformers 5.23)."""
    experts = any(layer.mlp.kind == "moe" for layer in plan.job.architecture.kinds)
    return experts and plan.recipe.method == "full" and kind in ("plain", "ddp")


def ending(kind: ScriptKind, training: Training, rejoin: bool = False) -> list[str]:
    """Return main(), the functions that read the data, and the call of main(). `rejoin`: see `rejoins`."""
    main = _MAIN.format(rejoin=_REJOIN if rejoin else "")
    data = data_text(kind, training).splitlines()
    return ["", "", *main.splitlines(), "", "", *data, *CALL.splitlines(), ""]


CALL = """\
if __name__ == "__main__":
    main()
"""
_MAIN = '''\
def main() -> None:
    args = arguments()
    checkpoint = checkpoint_of(args)
{rejoin}\
    trainer = build(args)
    if args.resume and checkpoint is None and trainer.is_world_process_zero():
        print(f"{{args.output}} holds no checkpoint: training starts at the beginning")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()


def checkpoint_of(args: argparse.Namespace) -> str | None:
    """Return the checkpoint to resume from: with a bare --resume the last in --output, else the named one."""
    named = next((path for path in args.resume if path is not True), None)
    return (last_checkpoint(args.output) if True in args.resume else None) or named


def last_checkpoint(output: str) -> str | None:
    """Return the last whole checkpoint; a run stopped while saving leaves one without trainer_state.json."""
    whole = [str(state.parent) for state in Path(output).glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.rpartition("-")[2]), default=None)
'''
_REJOIN = """\
    # from_pretrained joins the experts of a checkpoint; the Trainer would leave them untrained
    args.model = checkpoint or args.model
"""


# ---- requirements.txt

# the versions whose memory is modelled
PINS = {
    "torch": "torch>=2.11",
    "transformers": "transformers>=5.23,<6",  # activation_checkpointing_kwargs with offload
    "trl": "trl>=1.15,<2",  # the fused LM head
    "peft": "peft>=0.18,<1",
    "accelerate": "accelerate>=1.12,<2",
    "datasets": "datasets>=4.0",
    "bitsandbytes": "bitsandbytes>=0.48",
    "deepspeed": "deepspeed>=0.19",  # bf16_optimizer_states
    "torchao": "torchao>=0.17",
    "galore-torch": "galore-torch",
    "apollo-torch": "apollo-torch",
    "liger-kernel": "liger-kernel>=0.8",
    "sentence-transformers": "sentence-transformers>=5.2",
    "diffusers": "diffusers>=0.36",
    "kernels": "kernels",  # flash attention without a compiler: transformers fetches the built kernel
}


def requirements(
    recipe: Recipe, framework: str, kind: process_layout.Backend, more: Iterable[str] = ()
) -> str:  # fmt: skip
    """Return the text of requirements.txt for a script of `framework` ("trl" or "transformers").

    `more`: distributions that its data needs.
    """
    pins = PINS if recipe.adapter == "lora" else PINS | {"peft": "peft>=0.21,<1"}  # the release that has all adapters
    return "".join(f"{pins.get(name, name)}\n" for name in (*packages(recipe, framework, kind), *more))


def missing(recipe: Recipe, framework: str, more: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the distributions that a script of `framework` needs, with `more`, and that are not installed."""
    needed = (*packages(recipe, framework, process_layout.backend(recipe)), *more)
    return tuple(name for name in needed if not installed(name))


def installed(name: str) -> bool:
    """Return whether a distribution of that name is installed, without importing it."""
    from importlib import metadata  # slow to import, and no plan needs it

    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def packages(recipe: Recipe, framework: str, kind: process_layout.Backend) -> list[str]:
    """Return the distributions that such a script needs."""
    needed = ["torch", "transformers", "accelerate", "datasets"]
    needed += ["trl"] if framework == "trl" else []
    needed += ["peft"] if recipe.method != "full" else []
    needed += ["bitsandbytes"] if recipe.quantization != "none" else []
    needed += ["deepspeed"] if kind == "deepspeed" else []
    needed += ["kernels"] if recipe.attention == "flash" else []
    needed += ["liger-kernel"] if framework == "transformers" and recipe.loss == "fused" else []
    package = optimizer_row(recipe.optimizer).package
    return needed + ([package] if package in PINS and package not in needed else [])
