"""Find the text of a record in each layout that trainers read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from memfit.data.files import Record

CHAT_TOKENS = 5  # around each message: <|im_start|> role \n ... <|im_end|> \n; Llama 3's template has as many
END = 1  # the end-of-sequence token, which trainers append to plain text
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n{}"
)
UNEVEN = "labels or masks are not as many as the tokens"
BAD_TOOLS = "'tools' is text, and no JSON"
NO_OBJECT, NO_TEXT = "a sample must be an object with fields", "is not text but"
NO_ROLE = "a message says neither its role nor whom it is from"
NOT_TEXT = "images, audio and other parts of messages that are not text were not counted"
CHAT_NOTE = (
    f"chat markup counted as {CHAT_TOKENS} tokens a message; a system prompt that the template adds is not counted"
)
# what Qwen's chat template writes around the definitions of tools
TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a json "
    "object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
TOOLS_NOTE = "tools counted as Qwen's chat template writes them"
ALPACA_NOTE = "instructions counted in the Alpaca template; a chat template takes about 30 tokens less"


class Text(NamedTuple):
    """Texts that make one, and its tokens that are not text."""

    texts: list[str]
    tokens: int


class Example(NamedTuple):
    """One training example: its texts to tokenise, its tokens that are not text, and what tasks have beside."""

    line: int = 0
    layout: str = ""
    texts: list[str] = []  # noqa: RUF012  # never changed
    tokens: int = 0  # besides those of the texts: given token ids, chat markup, the end of the sequence
    notes: tuple[str, ...] = ()  # assumptions of the count
    answers: tuple[Text, ...] = ()  # each follows the texts in a sequence of its own, so the longest counts
    target: Text = Text([], 0)  # what the model writes for the texts
    prompt: Text = Text([], 0)  # what answers are sampled for
    labels: tuple[str, ...] = ()
    seconds: float = 0.0  # of a recording
    images: tuple[tuple[int, int], ...] = ()  # width and height of each; (0, 0): not known
    empty: bool = False  # it has no token to learn, so train.py leaves it out
    highest: int = -1  # the largest given token id; -1: none are given
    number: bool = False  # one of its texts is written as a number, or as true or false


class UnusableError(Exception):
    """Raised for a record that cannot be used; the message names the reason."""


def sample_of(record: Record, text_field: str = "") -> Example:
    """Read a record by its layout, or only the field `text_field`. Raises UnusableError if it has neither."""
    value = {"text": record.value} if isinstance(record.value, str) else record.value
    if not isinstance(value, dict):
        raise UnusableError(f"{NO_OBJECT}, not {_kind(value)}")
    if text_field and not isinstance(record.value, str):
        return Example(record.line, text_field, [text_of(value, text_field)], END)
    if value.get("chosen") is not None and value.get("rejected") is not None:
        raise UnusableError("preferences (chosen, rejected), and not examples")
    for layout, needed, read in LAYOUTS:
        if all(value.get(name) is not None for name in needed):
            number = any(isinstance(value[name], bool | int | float) for name in needed)
            return read(record.line, layout, value)._replace(empty=value[needed[-1]] in ("", []), number=number)
    fields = ", ".join(f"'{str(name)[:30]}'" for name in list(value)[:6]) or "none"
    raise UnusableError(f"no known fields; found {fields}")


def _input_ids(line: int, layout: str, value: dict[str, Any]) -> Example:
    ids = parsed(value["input_ids"])
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UnusableError("'input_ids' is not a list of whole numbers")
    for name in ("labels", "completion_mask", "assistant_masks"):
        other = parsed(value.get(name))
        if isinstance(other, list) and len(other) != len(ids):
            raise UnusableError(f"{UNEVEN}: {len(ids)} input_ids, {len(other)} {name}")
    return Example(line, layout, [], len(ids), highest=max(ids, default=-1))


def _chat(line: int, layout: str, value: dict[str, Any]) -> Example:
    texts, notes = _messages(parsed(value[layout]))
    return _beside(value, Example(line, layout, texts, CHAT_TOKENS * len(texts), notes))


def _beside(value: dict[str, Any], chat: Example) -> Example:
    """Add the texts of other columns to a chat: a system prompt, earlier turns, definitions of tools."""
    texts, tokens, notes = list(chat.texts), chat.tokens, chat.notes
    system, tools, history = value.get("system"), parsed(value.get("tools")), value.get("history")
    if isinstance(tools, str) and tools:
        raise UnusableError(BAD_TOOLS)
    if isinstance(system, str) and system:
        texts.append(_sound(system))
        tokens += CHAT_TOKENS
    if isinstance(history, list):
        turns = [text for pair in history if isinstance(pair, list) for text in pair if isinstance(text, str)]
        texts += map(_sound, turns)
        tokens += CHAT_TOKENS * len(turns)
    if isinstance(tools, list) and tools:
        texts.append(_sound(TOOLS.format("\n".join(json.dumps(tool, default=str) for tool in tools))))
        notes = (*notes, TOOLS_NOTE)
    return chat._replace(texts=texts, tokens=tokens, notes=notes)


def _pair(line: int, layout: str, value: dict[str, Any]) -> Example:
    """Read two fields, each a text or a list of messages."""
    texts: list[str] = []
    tokens = END
    notes: tuple[str, ...] = ()
    for name in layout.split("+"):
        if isinstance(value[name], list):
            found, more = _messages(value[name])
            texts, tokens, notes = texts + found, tokens + CHAT_TOKENS * len(found), notes + more
        else:
            texts.append(text_of(value, name))
    pair = Example(line, layout, texts, tokens, notes)
    return _beside(value, pair) if notes else pair  # trainers add other columns to chats only


def _instruction(line: int, layout: str, value: dict[str, Any]) -> Example:
    given = text_of(value, "input") if value.get("input") is not None else ""
    text = ALPACA.format(text_of(value, "instruction"), given, text_of(value, "output"))
    return _beside(value, Example(line, layout, [text], END, (ALPACA_NOTE,)))


LAYOUTS: tuple[tuple[str, tuple[str, ...], Callable[[int, str, dict[str, Any]], Example]], ...] = (
    ("input_ids", ("input_ids",), _input_ids),
    ("messages", ("messages",), _chat),
    ("conversations", ("conversations",), _chat),
    ("text", ("text",), lambda line, layout, value: Example(line, layout, [text_of(value, "text")], END)),
    ("prompt+completion", ("prompt", "completion"), _pair),
    ("prompt+response", ("prompt", "response"), _pair),
    ("question+answer", ("question", "answer"), _pair),
    ("instruction+input+output", ("instruction", "output"), _instruction),
)
KNOWN_FIELDS = frozenset(name for _, needed, _ in LAYOUTS for name in needed) | {
    "input", "system", "tools", "chat_template_kwargs", "history",
    "labels", "completion_mask", "assistant_masks", "chosen", "rejected",
}  # fmt: skip


def text_of(value: dict[str, Any], name: str) -> str:
    """Return a column that is text or a number. Raises UnusableError."""
    cell = value.get(name)
    if isinstance(cell, bool | int | float):  # train.py converts it to text, too
        return str(cell)
    if not isinstance(cell, str):
        raise UnusableError(f"'{name}' {'is missing' if cell is None else f'{NO_TEXT} {_kind(cell)}'}")
    return _sound(cell)


def _sound(text: str) -> str:
    """Return the text. Raises UnusableError for half a surrogate pair, on which tokenizers fail."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        reason = "the text is not valid Unicode (a byte that is not UTF-8, or half a surrogate pair)"
        raise UnusableError(reason) from None
    return text


def _messages(value: Any) -> tuple[list[str], tuple[str, ...]]:
    """Return the text of each message and notes on what is not counted; reads role/content and from/value."""
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise UnusableError("the messages are not a list of objects")
    texts: list[str] = []
    notes: tuple[str, ...] = (CHAT_NOTE,)
    for message in value:
        if message.get("role") is None and message.get("from") is None:
            raise UnusableError(NO_ROLE)
        content = message.get("content", message.get("value"))
        parts = content if isinstance(content, list) else [{"text": "" if content is None else content}]
        found = [p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]
        if len(found) < len(parts):
            notes = (CHAT_NOTE, NOT_TEXT)
        calls = json.dumps(message["tool_calls"], default=str) if message.get("tool_calls") else ""
        texts.append(_sound("".join(found) + calls))
    return texts, notes


def messages_of(value: Any) -> list[str]:
    """Return the text of each message."""
    return _messages(value)[0]


def parsed(value: Any) -> Any:
    """Parse a CSV cell that holds JSON; return anything else unchanged."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
