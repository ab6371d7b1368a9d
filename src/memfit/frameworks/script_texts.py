"""What the scripts of texts have of their own: labels of texts and tokens, masked and next tokens, pairs of texts."""

from __future__ import annotations

from dataclasses import replace

from memfit.data.task_samples import COLUMNS, Lines
from memfit.frameworks.script_data import LABELS, READ, READERS, ROWS, ScriptKind, Setting, layouts, tokens
from memfit.nouns.plan import Plan

# columns that hold files: none of texts
FILES = "FILES = ()\n"


def _data(lines: Lines, more: str = "") -> str:
    return layouts(*lines) + FILES + READERS + ROWS + READ + more


_TOKENIZER = "    tokenizer = AutoTokenizer.from_pretrained(args.model)\n"
_TYPE = {"transformers": ("AutoTokenizer", "PreTrainedTokenizerBase")}
_LABELLED = {**_TYPE, "datasets": ("ClassLabel", "List")}

LABEL = ScriptKind(
    holds="hold a text,\nor two, and a label",
    data=_data(COLUMNS["label"], LABELS),
    imports=_LABELLED,
    encode='''\
def encode(samples: Dataset, tokenizer: PreTrainedTokenizerBase, labels: list[str]) -> Dataset:
    """Return token ids, cut to MAX_LENGTH, and the number of each label."""
    *texts, label = samples.column_names
    numbers = numbers_of(samples, labels)

    def encoded(row: dict) -> dict:
        found = tokenizer(*(str(row[name]) for name in texts), truncation=True, max_length=MAX_LENGTH)
        return {**found, "labels": numbers[row[label]]}

    return samples.map(encoded, remove_columns=samples.column_names)
''',
    prepare=_TOKENIZER + """\
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    labels = list(names_of(samples).values())
""",
    encoded="encode({}, tokenizer, labels)",
    collator="DataCollatorWithPadding(tokenizer)",
    loading="pad_token_id=tokenizer.pad_token_id, **head(labels)",
    sizes=tokens,
)  # fmt: skip

TOKEN_LABELS = ScriptKind(
    holds="hold words\nand the tag of each",
    data=_data(COLUMNS["token-labels"], LABELS),
    imports=_LABELLED,
    encode='''\
def encode(samples: Dataset, tokenizer: PreTrainedTokenizerBase, labels: list[str]) -> Dataset:
    """Return token ids, cut to MAX_LENGTH, and the number of each word's tag at its first token."""
    words, tags = samples.column_names
    numbers = numbers_of(samples, labels)

    def encoded(row: dict) -> dict:
        found = tokenizer(row[words], is_split_into_words=True, truncation=True, max_length=MAX_LENGTH)
        places = found.word_ids()
        first = [place is not None and place != before for place, before in zip(places, [None, *places], strict=False)]
        learned = [numbers[row[tags][place]] if new else -100 for place, new in zip(places, first, strict=True)]
        return {**found, "labels": learned}

    return samples.map(encoded, remove_columns=samples.column_names)
''',
    prepare="""\
    tokenizer = AutoTokenizer.from_pretrained(args.model, add_prefix_space=True)
    labels = list(names_of(samples).values())
""",
    encoded="encode({}, tokenizer, labels)",
    collator="DataCollatorForTokenClassification(tokenizer)",
    loading="**head(labels)",
    sizes=tokens,
)

MASKED = ScriptKind(
    holds="hold text",
    data=_data(COLUMNS["text"]),
    imports=_TYPE,
    encode='''\
def encode(samples: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return rows of MAX_LENGTH tokens, of the texts end to end."""

    def encoded(rows: dict) -> dict:
        (texts,) = rows.values()
        ids = [token for text in texts for token in tokenizer(str(text), verbose=False).input_ids]
        return {"input_ids": [ids[i : i + MAX_LENGTH] for i in range(0, len(ids), MAX_LENGTH)]}

    return samples.map(encoded, batched=True, remove_columns=samples.column_names)
''',
    prepare=_TOKENIZER,
    encoded="encode({}, tokenizer)",
    collator="DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)",
    sizes=tokens,
)


PRETRAIN = replace(
    MASKED,
    encode='''\
def encode(samples: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return rows of MAX_LENGTH tokens, of the texts end to end, each with its last token."""

    def encoded(rows: dict) -> dict:
        (texts,) = rows.values()
        ids = [token for text in texts for token in tokenizer(f"{text}{tokenizer.eos_token}", verbose=False).input_ids]
        cut = [ids[i : i + MAX_LENGTH] for i in range(0, len(ids), MAX_LENGTH)]
        return {"input_ids": cut, "labels": cut}

    return samples.map(encoded, batched=True, remove_columns=samples.column_names)
''',
    prepare=_TOKENIZER + "    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token\n",
    collator="DataCollatorForSeq2Seq(tokenizer)",
)

ANCHOR = ScriptKind(
    holds="hold a text\nand one that means the same or answers it; the others of a batch are its negatives",
    data=_data(COLUMNS["anchor"]),
    imports={"sentence_transformers.losses": ("MultipleNegativesRankingLoss",)},
    packages=("sentence-transformers",),
    sizes=tokens,
    prepare="    model = load_model(args.model, args.cpu)\n",
    given=(("loss", "MultipleNegativesRankingLoss(model)", ""),),
)  # fmt: skip


def _both_lengths(plan: Plan) -> list[Setting]:
    return [*tokens(plan), ("TARGET_LENGTH", str(plan.job.shape.target), "tokens of what is written")]


PAIRS = ScriptKind(
    holds="hold a text\nand the one to write for it",
    data=_data(COLUMNS["text-to-text"]),
    imports=_TYPE,
    encode='''\
def encode(samples: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return token ids of both texts, cut to MAX_LENGTH and TARGET_LENGTH."""
    source, target = samples.column_names

    def encoded(row: dict) -> dict:
        found = tokenizer(str(row[source]), truncation=True, max_length=MAX_LENGTH)
        written = tokenizer(text_target=str(row[target]), truncation=True, max_length=TARGET_LENGTH)
        return {**found, "labels": written.input_ids}

    return samples.map(encoded, remove_columns=samples.column_names)
''',
    prepare=_TOKENIZER,
    encoded="encode({}, tokenizer)",
    collator="DataCollatorForSeq2Seq(tokenizer)",
    sizes=_both_lengths,
)  # fmt: skip
