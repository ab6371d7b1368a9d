"""The part of a generated train.py that reads the data: files and datasets, and the layouts of language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memfit.frameworks.text import literal
from memfit.nouns.job import Columns, Training
from memfit.nouns.plan import Plan

Setting = tuple[str, str, str]  # name, value as source text, comment


def tokens(plan: Plan) -> list[Setting]:
    """Return the constant that holds the length of a text."""
    return [("MAX_LENGTH", str(plan.recipe.sequence_length), "tokens; longer samples are cut")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptKind:
    """What the script for one kind of sample has of its own.

    `data` and `encode` are functions of the script, `prepare` lines of its build(), where `samples`, `args` and
    `config` are known. The others are Python expressions over what these define.
    """

    holds: str  # what the rows of the data hold, with its verb
    data: str  # reads the data: load() and what it needs
    imports: Mapping[str, tuple[str, ...]]  # module -> names, beside those of the trainer and of `read`
    sizes: Callable[[Plan], list[Setting]]  # constants of the script that hold the size of a sample
    packages: tuple[str, ...] = ()  # distributions beside the trainer's
    encode: str = ""  # what follows build()
    prepare: str = ""
    encoded: str = "{}"  # what the trainer takes; {}: the samples
    processor: str = "tokenizer"  # saved with the model
    arguments: tuple[Setting, ...] = ()  # further words of the trainer's arguments
    given: tuple[Setting, ...] = ()  # further words of the trainer
    # of scripts for transformers' Trainer; TRL's trainers collate themselves
    collator: str = ""
    loading: str = ""  # further words of from_pretrained


def layouts(*lines: tuple[str, ...]) -> str:
    """Return the constant LAYOUTS."""
    note = "# the columns of a sample; the first line whose columns the data has is used\n"
    return f"{note}{_LAYOUTS}{''.join(map(_line, lines))})\n"


_LAYOUTS = "LAYOUTS = (\n"


def _line(names: tuple[str, ...]) -> str:
    return f"    ({', '.join(map(literal, names))}{',' * (len(names) == 1)}),\n"


def data_text(kind: ScriptKind, training: Training) -> str:
    """Return the functions that read the data, with what the job says on its columns, tokens and evaluation."""
    text = kind.data
    line = first_columns(training.columns) if kind in (SFT, SFT_TOKENS) else None
    if line is not None:  # before lines that the data may have as well
        text = text.replace(_LAYOUTS, _LAYOUTS + _line(line))
    if training.pad_token or training.eos_token or training.bos_token:
        text = text.replace(_MADE, _MADE + _TOKENS)
    return _TITLE + (_SPLIT.format(seed=training.seed) if training.eval_share else "") + text


def first_columns(columns: Columns | None) -> tuple[str, ...] | None:
    """Return the columns as a line of LAYOUTS; None where they are not known or the script cannot read them."""
    if columns is None or not reads(columns):
        return None
    return ("instruction", "output") if columns.fields[0] == "instruction" else columns.fields


def reads(columns: Columns) -> bool:
    """Return whether the script can read these columns: chats, text, pairs, instructions."""
    if columns.chat:
        return len(columns.fields) == 1 and (columns.role, columns.content) in (("role", "content"), ("from", "value"))
    if len(columns.fields) == 1:
        return columns.fields[0] in ("text", "input_ids")
    return len(columns.fields) == 2 or columns.fields[0] == "instruction"


_TITLE = "# ---- the data\n\n"
_SPLIT = '''\
def split(samples: Dataset) -> tuple[Dataset, Dataset]:
    """Return the samples to learn from, and EVAL_SHARE of them that is held out for evaluation."""
    parts = samples.train_test_split(test_size=EVAL_SHARE, seed={seed})
    return parts["train"], parts["test"]


'''
_MADE = "    tokenizer = AutoTokenizer.from_pretrained(model)\n"
_TOKENS = """\
    if tokenizer.add_special_tokens(TOKENS):
        raise SystemExit(f"{model} has not all of {TOKENS} in its vocabulary, and its embeddings would have to grow")
"""
CHAT_TEMPLATE = """\
# for tokenizers without a chat template, such as those of base models; it is saved with the model
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '### tools\\n' + tools | tojson + '\\n' }}{% endif %}"
    "{% for message in messages %}{{ '### ' + message['role'] + '\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
"""
KEPT = """\
KEPT = ("tools", "chat_template_kwargs")  # columns that a chat template reads beside the messages
"""
READERS = """\
READERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}  # other files are read as JSON
ENDINGS = (*READERS, ".json", ".jsonl", ".ndjson")


"""
_LOAD = '''\
def load(data: str) -> Dataset:
    """Return the samples: messages, text, a prompt with its completion, or input_ids. Other rows are left out."""
    rows = read(data)
    names = next((names for names in LAYOUTS if set(names) <= set(rows.column_names)), None)
    if names is None:
        raise SystemExit(f"{data} has the columns {rows.column_names}, but needs those of one line of LAYOUTS")
    if {"chosen", "rejected"} <= set(rows.column_names):
        raise SystemExit(f"{data} holds preferences (chosen, rejected), and this script learns from examples alone")
    if any(type(rows.features[name]).__name__ == "Json" for name in names):
        raise SystemExit(f"{data} holds text in some rows and messages in others: write them to files of their own")
    usable = rows.filter(lambda row: row[names[0]] is not None and row[names[-1]] not in (None, "", []))
    if len(usable) < len(rows) and not data.endswith(".txt"):  # whose empty lines are no samples
        left = len(rows) - len(usable)
        print(f"warning: {data}: {left} of {len(rows)} rows without {' and '.join(names)} are left out")
    kinds = types(rows, names)
    return usable.map(lambda row: sample(row, names), remove_columns=rows.column_names, features=kinds)


'''
READ = '''\
def read(data: str) -> Dataset:
    """Return the rows of a file with its values as written, or of a dataset on the Hub."""
    suffix = Path(data).suffix.lower()
    if not Path(data).exists():
        if suffix in ENDINGS:
            raise SystemExit(f"there is no file {data}")
        return load_dataset(data, split="train")
    if suffix in (".csv", ".tsv"):
        separator = "\\t" if suffix == ".tsv" else ","
        with Path(data).open(encoding="utf-8-sig", newline="") as file:
            columns = next(csv.reader(file, delimiter=separator), [])
        # keep cells as written: pandas turns some into numbers, and reads "None" and "NA" as missing
        cells = {"converters": dict.fromkeys(columns, cell), "keep_default_na": False}
        return load_dataset("csv", data_files=data, split="train", sep=separator, **cells)
    rows = load_dataset(READERS.get(suffix, "json"), data_files=data, split="train")
    kinds = [kind.dtype for kind in rows.features.values() if isinstance(kind, Value)]
    if suffix not in READERS and any(kind.startswith("timestamp") for kind in kinds):
        text = Path(data).read_text(encoding="utf-8-sig")  # datasets parsed a column of dates: keep them as written
        whole = text.lstrip().startswith("[")
        rows = Dataset.from_list(json.loads(text) if whole else [json.loads(x) for x in text.splitlines() if x.strip()])
    return rows


def cell(text: str) -> str | None:
    """Return a cell of a table, None for an empty one."""
    return text or None


'''
_SAMPLES = '''\
def types(rows: Dataset, names: tuple[str, ...]) -> Features | None:
    """Return the types of the samples: messages hold a role and plain text, numbers are text; None: infer them."""
    if names in (("input_ids",), ("instruction", "output")):
        return None
    kinds = [rows.features[name] for name in names]
    made = ("prompt", "completion") if len(names) == 2 else ("text",) if names == ("text",) else ("messages",)
    if all(isinstance(kind, List) for kind in kinds):
        text = {"role": Value("string"), "content": Value("string")}
        kinds = [List({**kind.feature, **text}) if isinstance(kind.feature, dict) else kind for kind in kinds]
    elif made == ("messages",) or any(isinstance(kind, List) for kind in kinds):
        return None
    else:  # numbers among them
        kinds = [Value("string")] * len(kinds)
    kept = [name for name in KEPT if name in rows.column_names and made != ("text",)]
    return Features({**dict(zip(made, kinds, strict=True)), **{name: rows.features[name] for name in kept}})


def sample(row: dict, names: tuple[str, ...]) -> dict:
    """Return one row as a sample of `load`; an instruction becomes a chat of one turn."""
    first, last = chat(row[names[0]]), chat(row[names[-1]])
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if names == ("instruction", "output"):
        history = row.get("history") if isinstance(row.get("history"), list) else []
        turns = [text for pair in history for text in pair]
        turns.append("\\n\\n".join(str(part) for part in (row["instruction"], row.get("input")) if part))
        asked = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        return {"prompt": system + asked, "completion": [{"role": "assistant", "content": last}]}
    if names == ("text",):
        return {"text": first}
    kept = {name: row[name] or (None if name == "tools" else {}) for name in KEPT if name in row}
    if len(names) == 2:
        return {"prompt": system + first if isinstance(first, list) else first, "completion": last, **kept}
    value = chat(json.loads(first)) if isinstance(first, str) else first  # a cell of a table
    if names == ("input_ids",):
        mask = row.get("completion_mask") or row.get("assistant_masks") or []
        for part in (row.get("labels"), mask):
            if part and len(part) != len(value):
                raise SystemExit(f"{len(value)} input_ids have {len(part)} labels or values of a mask: {str(row)[:99]}")
        masked = [token if learned else -100 for token, learned in zip(value, mask, strict=False)]
        labels = row.get("labels") or masked
        return {"input_ids": value, **({"labels": labels} if labels else {})}
    return {"messages": value if any(m["role"] == "system" for m in value) else system + value, **kept}


'''
ROWS = '''\
def load(data: str) -> Dataset:
    """Return the columns of the first line of LAYOUTS that the data has. Rows without one of them are left out."""
    rows = read(data)
    names = next((names for names in LAYOUTS if set(names) <= set(rows.column_names)), None)
    if names is None:
        raise SystemExit(f"{data} has the columns {rows.column_names}, but needs those of one line of LAYOUTS")
    checked = [name for name in names if name not in FILES]  # which are read only when they are used
    usable = rows.filter(lambda *values: all(value not in (None, "", []) for value in values), input_columns=checked)
    if left := len(rows) - len(usable):
        print(f"warning: {data}: {left} of {len(rows)} rows without {' and '.join(checked)} are left out")
    return usable.select_columns(list(names))


'''
LABELS = '''\
def names_of(samples: Dataset) -> dict:
    """Return the name of each label in the last column."""
    column = samples.column_names[-1]
    kind = samples.features[column]
    kind = kind.feature if isinstance(kind, List) else kind
    if isinstance(kind, ClassLabel):
        return dict(enumerate(kind.names))
    values = [row[column] for row in samples.select_columns(column)]
    flat = {one for value in values for one in (value if isinstance(value, list) else [value])}
    return {value: str(value) for value in sorted(flat)}


def numbers_of(samples: Dataset, labels: list[str]) -> dict:
    """Return the number of each label in the last column."""
    names = names_of(samples)
    if unknown := set(names.values()) - set(labels):
        raise SystemExit(f"the data to evaluate on has labels that are not trained: {', '.join(sorted(unknown))}")
    return {value: labels.index(name) for value, name in names.items()}


def head(labels: list[str]) -> dict:
    """Return the words of from_pretrained that make a new head for the labels, and name them in its config."""
    named = dict(enumerate(labels))
    return {
        "num_labels": len(labels),
        "id2label": named,
        "label2id": {name: number for number, name in named.items()},
        "ignore_mismatched_sizes": True,
    }


'''
CHAT = '''\
def chat(value: object) -> object:
    """Return messages with `role` and plain text `content`, numbers as text, and any other value unchanged."""
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return value if value is None or isinstance(value, str | list | dict) else str(value)
    roles = {"human": "user", "gpt": "assistant"}
    found = []
    for message in value:
        role, content = message.get("role") or message.get("from"), message.get("content") or message.get("value") or ""
        if role is None:
            raise SystemExit(f"a message has neither `role` nor `from`: {str(message)[:200]}")
        if not isinstance(content, str):
            content = "".join(part.get("text") or "" for part in content)
        found.append({**message, "role": roles.get(role, role), "content": content})
    return found


'''
LOADED = "load_tokenizer(args.model, samples)"  # a call of the next
TOKENIZER = '''\
def load_tokenizer(model: str, samples: Dataset) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with a plain chat template if the samples are chats and it has none."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = any(isinstance(value, list) and value and isinstance(value[0], dict) for value in samples[0].values())
    if chats and tokenizer.chat_template is None:
        print(f"warning: {model} has no chat template; CHAT_TEMPLATE is used, saved with the model, and needed to chat")
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


'''
_TOKENIZE = '''\
def tokenize(samples: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return token ids and labels, cut to MAX_LENGTH; the prompt of a completion is not learned."""

    def ids_of(text: list | str, row: dict, prompt: bool = False) -> list[int]:
        if isinstance(text, list):  # the template writes the special tokens itself
            tools = row.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) else tools
            words = {"tools": tools, "return_dict": True, **(row.get("chat_template_kwargs") or {})}
            return tokenizer.apply_chat_template(text, add_generation_prompt=prompt, **words)["input_ids"]
        end = "" if prompt or text.endswith(tokenizer.eos_token) else tokenizer.eos_token
        return tokenizer(text + end).input_ids

    def encode(row: dict) -> dict:
        read = 0
        if "completion" in row:
            asked, ids = ids_of(row["prompt"], row, prompt=True), ids_of(row["prompt"] + row["completion"], row)
            same = [one == other for one, other in zip(asked, ids, strict=False)]
            read = same.index(False) if False in same else len(same)  # tokens may merge where the completion begins
        elif "input_ids" in row:
            ids = row["input_ids"]
        else:
            ids = ids_of(row.get("text") or row["messages"], row)
        labels = row.get("labels") or [-100] * read + ids[read:]
        return {"input_ids": ids[:MAX_LENGTH], "labels": labels[:MAX_LENGTH]}

    rows = samples.map(encode, remove_columns=samples.column_names)
    return rows.filter(lambda row: any(label != -100 for label in row["labels"]))  # drops rows without a token to learn
'''

SFT = ScriptKind(
    holds="hold messages,\ntext, a prompt and its completion, an instruction and its output, or input_ids",
    data=CHAT_TEMPLATE + layouts(
        ("input_ids",), ("messages",), ("conversations",), ("text",), ("prompt", "completion"),
        ("prompt", "response"), ("question", "answer"), ("instruction", "output"),
    ) + KEPT + READERS + _LOAD + READ + _SAMPLES + CHAT + TOKENIZER,
    imports={"datasets": ("Features", "List"), "transformers": ("AutoTokenizer", "PreTrainedTokenizerBase")},
    processor=LOADED,
    sizes=tokens,
)  # fmt: skip
# for transformers' Trainer, which does not tokenize
SFT_TOKENS = replace(
    SFT,
    encode=_TOKENIZE,
    prepare="""\
    tokenizer = load_tokenizer(args.model, samples)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
""",
    encoded="tokenize({}, tokenizer)",
    collator="DataCollatorForSeq2Seq(tokenizer)",
    processor="tokenizer",
)
