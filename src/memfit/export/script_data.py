"""The part of a generated train.py that reads the data: every layout of `memfit data`, and a chat template where none is."""

from __future__ import annotations

DATA = '''\
# ---- the data

# used where the tokenizer brings no chat template, as those of base models; it is saved with the model
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '### ' + message['role'] + '\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
# the columns that hold a sample; the first line that fits the data is taken
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
READERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}  # other files are read as JSON
ENDINGS = (*READERS, ".json", ".jsonl", ".ndjson")


def load(data: str) -> Dataset:
    """The samples: messages, text, a prompt with its completion, or input_ids. Rows without them are left out."""
    if Path(data).exists():
        separator = {"sep": "\\t"} if data.endswith(".tsv") else {}
        rows = load_dataset(READERS.get(Path(data).suffix, "json"), data_files=data, split="train", **separator)
    elif Path(data).suffix in ENDINGS:
        raise SystemExit(f"there is no file {data}")
    else:
        rows = load_dataset(data, split="train")
    names = next((names for names in LAYOUTS if set(names) <= set(rows.column_names)), None)
    if names is None:
        raise SystemExit(f"{data} has the columns {rows.column_names}, but needs those of a line of LAYOUTS")
    usable = rows.filter(lambda row: row[names[0]] is not None and row[names[-1]])
    if len(usable) < len(rows) and not data.endswith(".txt"):  # whose empty lines are no samples
        left = len(rows) - len(usable)
        print(f"warning: {data}: {left} of {len(rows)} rows without {' and '.join(names)} are left out")
    return usable.map(lambda row: sample(row, names), remove_columns=rows.column_names)


def sample(row: dict, names: tuple[str, ...]) -> dict:
    """One row under the names of `load`; an instruction becomes a chat of one turn."""
    if names == ("instruction", "output"):
        asked = "\\n\\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return {
            "prompt": [{"role": "user", "content": asked}],
            "completion": [{"role": "assistant", "content": row["output"]}],
        }
    if len(names) == 2:
        return {"prompt": chat(row[names[0]]), "completion": chat(row[names[1]])}
    value = row[names[0]]
    if names == ("text",):
        return {"text": value}
    value = json.loads(value) if isinstance(value, str) else value  # a cell of a table
    kept = {name: row[name] for name in ("labels", "tools") if row.get(name)}
    return {"input_ids" if names == ("input_ids",) else "messages": chat(value), **kept}


def chat(value: list | str) -> list | str:
    """Messages with a role and plain text, whatever their keys were called; anything else as it is."""
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return value
    roles = {"human": "user", "gpt": "assistant"}
    found = []
    for message in value:
        role, content = message.get("role") or message["from"], message.get("content") or message.get("value") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text") or "" for part in content)
        found.append({**message, "role": roles.get(role, role), "content": content})
    return found


def load_tokenizer(model: str, samples: Dataset) -> PreTrainedTokenizerBase:
    """The model's tokenizer; with a plain chat template where the samples are chats and it has none."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = any(isinstance(value, list) and value and isinstance(value[0], dict) for value in samples[0].values())
    if chats and tokenizer.chat_template is None:
        print(f"warning: {model} has no chat template; CHAT_TEMPLATE is used, saved with the model, and needed to chat")
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


'''
