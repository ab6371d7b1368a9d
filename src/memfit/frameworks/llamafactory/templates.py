"""Which of LLaMA-Factory's chat templates a model was trained with, by its name. Source: its constants.py, 0.9.5."""

from __future__ import annotations

import re

# names of models that were trained to chat, and of families whose plain name is the chat model
_CHATS = re.compile(
    r"instruct|chat|thinking|distill|[-_]it\b|gpt-oss|phi-[34]|qwen3(?!.*base)|deepseek-(r1|v3)(?!.*base)", re.I
)
_TEMPLATES: tuple[tuple[str, str], ...] = (
    (r"deepseek-r1", "deepseekr1"),
    (r"deepseek-v[23]", "deepseek3"),
    (r"llama-?4", "llama4"),
    (r"llama-?3", "llama3"),
    (r"llama-?2", "llama2"),
    (r"qwen3\.5", "qwen3_5"),
    (r"qwen3-.*instruct-2507", "qwen3_nothink"),
    (r"qwen3-(?!vl|omni|next|coder)", "qwen3"),
    (r"qwen(1\.5|2|2\.5)-(?!vl|audio|omni)", "qwen"),
    (r"gemma-3n", "gemma3n"),
    (r"gemma-3", "gemma3"),
    (r"gemma-2-", "gemma2"),
    (r"gemma-(1\.1-)?\d", "gemma"),
    (r"mistral-small|devstral", "mistral_small"),
    (r"mistral-nemo|ministral-8b", "ministral"),
    (r"mistral-7b|mixtral", "mistral"),
    (r"phi-4-mini", "phi4_mini"),
    (r"phi-4", "phi4"),
    (r"phi-3", "phi"),
    (r"smollm2", "smollm2"),
    (r"gpt-oss", "gpt_oss"),
    (r"glm-4-9b", "glm4"),
    (r"falcon-\d", "falcon"),
    (r"yi-(1\.5-)?\d", "yi"),
)


def template(model: str) -> str | None:
    """The template's name; "default" for a base model; None where the tokenizer's own template is to be taken."""
    name = model.rsplit("/", 1)[-1]
    if not _CHATS.search(name):
        return "default"
    return next((found for pattern, found in _TEMPLATES if re.search(pattern, name, re.I)), None)
