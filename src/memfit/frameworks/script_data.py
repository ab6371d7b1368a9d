"""The part of a generated train.py that reads the data, in all layouts of `memfit data`, with a chat template."""

from __future__ import annotations

from memfit.frameworks.text import literal
from memfit.nouns.job import Columns, Training


def data_text(training: Training) -> str:
    """Return the functions that read the data, with what the job says on its columns, tokens and evaluation."""
    text = _DATA
    if (line := first_columns(training.columns)) is not None:  # before lines that the data may have as well
        row = f"({', '.join(map(literal, line))}{',' * (len(line) == 1)})"
        text = text.replace("LAYOUTS = (\n", f"LAYOUTS = (\n    {row},\n")
    if training.pad_token or training.eos_token or training.bos_token:
        text = text.replace(_MADE, _MADE + _TOKENS)
    return _SPLIT.format(seed=training.seed) + text if training.eval_share else text


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
_DATA = '''\
# ---- the data

# for tokenizers without a chat template, such as those of base models; it is saved with the model
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '### tools\\n' + tools | tojson + '\\n' }}{% endif %}"
    "{% for message in messages %}{{ '### ' + message['role'] + '\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
# the columns of a sample; the first line whose columns the data has is used
LAYOUTS = (
    ("input_ids",),
    ("messages",),
    ("conversations",),
    ("text",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
)
KEPT = ("tools", "chat_template_kwargs")  # columns that a chat template reads beside the messages
READERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}  # other files are read as JSON
ENDINGS = (*READERS, ".json", ".jsonl", ".ndjson")


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


def load_tokenizer(model: str, samples: Dataset) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with a plain chat template if the samples are chats and it has none."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = any(isinstance(value, list) and value and isinstance(value[0], dict) for value in samples[0].values())
    if chats and tokenizer.chat_template is None:
        print(f"warning: {model} has no chat template; CHAT_TEMPLATE is used, saved with the model, and needed to chat")
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


'''
