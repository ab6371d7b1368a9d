"""What the scripts of preferences and rewards have of their own: pairs of answers, judged answers, sampled answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memfit.data.task_samples import COLUMNS
from memfit.frameworks.script_data import (
    CHAT,
    CHAT_TEMPLATE,
    KEPT,
    LOADED,
    READ,
    READERS,
    TOKENIZER,
    ScriptKind,
    Setting,
    layouts,
    tokens,
)
from memfit.frameworks.text import literal
from memfit.nouns.plan import Plan

_LOAD = '''\
def load(data: str) -> Dataset:
    """Return the samples by TRL's names of the columns. Rows without one of them are left out."""
    rows = read(data)
    names = next((names for names in LAYOUTS if set(names) <= set(rows.column_names)), None)
    if names is None:
        raise SystemExit(f"{data} has the columns {rows.column_names}, but needs those of one line of LAYOUTS")
    columns = list(names)
    usable = rows.filter(lambda *values: all(value not in (None, "", []) for value in values), input_columns=columns)
    if left := len(rows) - len(usable):
        print(f"warning: {data}: {left} of {len(rows)} rows without {' and '.join(names)} are left out")
    made = NAMES[-len(names) :]
    kept = [name for name in KEPT if name in rows.column_names]

    def sample(row: dict) -> dict:
        return {ours: value(ours, row[theirs]) for ours, theirs in zip(made, names, strict=True)}

    return usable.map(sample).select_columns([*made, *kept])


'''
_ANSWER = '''\
def value(name: str, found: object) -> object:
    """Return a text or messages as TRL reads them; a single message is a list of one."""
    return chat([found] if isinstance(found, dict) else found)


'''
_JUDGED = '''\
def value(name: str, found: object) -> object:
    """Return a text or messages as TRL reads them, and whether an answer is good."""
    if name == "label":
        return found if isinstance(found, bool) else str(found).lower() in ("1", "true", "yes", "good", "desirable")
    return chat([found] if isinstance(found, dict) else found)


'''


def _left_out(plan: Plan) -> list[Setting]:
    """Return the constant that holds the length of a text, above which TRL's RewardTrainer drops a pair."""
    return [("MAX_LENGTH", str(plan.recipe.sequence_length), "tokens; longer pairs are left out")]


def _kind(
    holds: str, names: tuple[str, ...], key: str, value: str = _ANSWER,
    sizes: Callable[[Plan], list[Setting]] = tokens,
) -> ScriptKind:  # fmt: skip
    """Return a row. `names`: of the columns in TRL, a line of fewer has the last of them; key: of COLUMNS."""
    named = f"NAMES = ({', '.join(map(literal, names))})  # as TRL has them\n"
    return ScriptKind(
        holds=holds,
        data=CHAT_TEMPLATE + layouts(*COLUMNS[key]) + named + KEPT + READERS + _LOAD + value + READ + CHAT + TOKENIZER,
        imports={"transformers": ("AutoTokenizer", "PreTrainedTokenizerBase")},
        processor=LOADED,
        sizes=sizes,
    )


_PAIR = ("prompt", "chosen", "rejected")
CHOICE = _kind("hold a prompt\nwith a chosen and a rejected answer, as text or messages", _PAIR, "choice")
REWARD = _kind(
    "hold a chosen\nand a rejected answer, perhaps with their prompt, as text or messages", _PAIR, "pair",
    sizes=_left_out,
)  # fmt: skip
ANSWERS = _kind(
    "hold a prompt,\nits answer and whether it is a good one, as text or messages", ("prompt", "completion", "label"),
    "kto", value=_JUDGED,
)  # fmt: skip

# ---- sampled answers

_REWARDED = '''\
def short(samples: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the samples whose prompts have at most PROMPT_LENGTH tokens."""

    def fits(prompt: str | list) -> bool:
        if isinstance(prompt, list):
            words = {"add_generation_prompt": True, "return_dict": True}
            return len(tokenizer.apply_chat_template(prompt, **words)["input_ids"]) <= PROMPT_LENGTH
        return len(tokenizer(prompt).input_ids) <= PROMPT_LENGTH

    found = samples.filter(fits, input_columns=["prompt"])
    if left := len(samples) - len(found):
        print(f"warning: {left} of {len(samples)} prompts have more than {PROMPT_LENGTH} tokens and are left out")
    return found


def reward(completions: list, answer: list, **columns: object) -> list[float]:
    """Return 1 for each completion that holds the answer. A reward of your own goes here; it takes columns by name."""
    texts = [found if isinstance(found, str) else found[-1]["content"] for found in completions]
    right = [str(text).rpartition("####")[2].strip() for text in answer]  # GSM8K's answers follow ####
    return [float(one in text) for one, text in zip(right, texts, strict=True)]
'''
# weight of the KL term, above 0 of which the trainer keeps a reference model: GRPO's default, RLOO's, and where one is
# asked for
_KL = {"grpo": "0.0", "rloo": "0.05"}
KL = 0.04


def _sampled(plan: Plan) -> list[Setting]:
    """Return the constants that hold the size of a prompt and of its answers."""
    shape = plan.job.shape
    weight = literal(KL) if shape.reference else _KL[plan.job.task]
    return [
        ("PROMPT_LENGTH", str(shape.prompt), "tokens; longer prompts are left out"),
        ("COMPLETION_LENGTH", str(shape.completion), "tokens of an answer at most"),
        ("GENERATIONS", str(shape.generations), "answers to each prompt"),
        ("KL", weight, "of the loss; above 0 a reference model is resident"),
    ]


PROMPT = replace(
    _kind(
        "hold a prompt,\nas text or messages, and its answer, which reward() looks for", ("prompt", "answer"),
        "prompt", sizes=_sampled,
    ),
    prepare="    tokenizer = load_tokenizer(args.model, samples)\n",
    encoded="short({}, tokenizer)",
    encode=_REWARDED,
    processor="tokenizer",
    arguments=(
        ("num_generations", "GENERATIONS", ""),
        ("num_generations_eval", "MICRO_BATCH", "evaluation samples no more answers at once"),
        ("max_completion_length", "COMPLETION_LENGTH", ""),
        ("beta", "KL", ""),
    ),
    given=(("reward_funcs", "reward", ""),),
)  # fmt: skip
