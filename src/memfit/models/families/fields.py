"""Read a config.json with checks: every wrong or missing value is an error that names the key."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.errors import TRACE_HINT, BadInput, Unsupported

MAX_SIZE = 1 << 26  # far above any dimension of a published model; larger numbers are typing errors or attacks
MAX_LAYERS = 4096  # layers are built one by one
_ABSENT = object()
_HEADS = (
    ("ForCausalLM", "lm"),
    ("LMHeadModel", "lm"),
    ("ForConditionalGeneration", "lm"),
    ("ForSeq2SeqLM", "lm"),  # transformers' names of tasks, as in AutoModelForSeq2SeqLM
    ("ForSpeechSeq2Seq", "lm"),
    ("ForMaskedLM", "masked-lm"),
    ("ForPreTraining", "pretraining"),
    ("ForImageClassification", "classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForSequenceClassification", "classification"),
    ("Model", "model"),
)

# key of published configs -> key that transformers 5 writes instead when it saves the model
SAVED_AS = {"num_experts": "num_local_experts"}


class Fields:
    """The values of a config by canonical names, which `aliases` map to the keys of the family.

    `defaults` are the values of the family's config class for keys that published files leave out. A key that is
    neither in the file nor among them is an error, never a guess.
    """

    def __init__(
        self, values: Mapping[str, object], name: str, aliases: Mapping[str, str] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.values, self.name = values, name
        self.aliases, self.defaults = aliases or {}, defaults or {}

    def raw(self, key: str) -> object:
        """Return the value as written; null stays None, because null in a file means "none", not "the default"."""
        for written in (self.aliases.get(key, key), key, SAVED_AS.get(key, key)):
            if written in self.values:
                return self.values[written]
        return self.defaults.get(key)

    def has(self, key: str) -> bool:
        """Return whether the file itself has the key, even with null."""
        return key in self.values or self.aliases.get(key, key) in self.values

    def size(self, key: str, default: int | object = _ABSENT, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a whole number from `least` to `most`; `default` replaces an absent or null key."""
        value = self.raw(key)
        if value is None:
            if default is _ABSENT:
                raise self._missing(key)
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(key, value, f"a whole number from {least} to {most}")
        return value

    def layers(self, key: str = "num_hidden_layers") -> int:
        return self.size(key, most=MAX_LAYERS)

    def number(self, key: str, default: float = 0.0) -> float:
        """Return a finite number: a dropout probability, a fraction."""
        value = self.raw(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.raw(key)
        value = default if value is None else value
        if value is None:
            raise self._missing(key)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def items(self, key: str, kind: type = str) -> tuple[object, ...] | None:
        """Return a list whose members are all of `kind`; None if it is absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
            raise self._wrong(key, value, f"a list of {kind.__name__}")
        if len(value) > MAX_LAYERS:
            raise self._wrong(key, f"{len(value)} entries", f"at most {MAX_LAYERS} entries")
        return tuple(value)

    def per_layer(self, key: str, layers: int, kind: type = str) -> tuple[object, ...] | None:
        """Return a list with exactly one entry per layer; None if it is absent."""
        value = self.items(key, kind)
        if value is not None and len(value) != layers:
            raise self._wrong(key, f"{len(value)} entries", f"one entry for each of the {layers} layers")
        return value

    def section(self, key: str) -> Mapping[str, object]:
        """Return a nested config, such as text_config."""
        value = self.raw(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return value

    def head_class(self) -> str:
        """Return the kind of head that `architectures` names: 'lm', 'classification', ... or 'model' for none."""
        names = self.items("architectures") or ("ForCausalLM",)
        for suffix, kind in _HEADS:
            if str(names[0]).endswith(suffix):
                return kind
        raise self.unsupported(f"the head of class '{names[0]}' is not modelled")

    def labels(self) -> int:
        """Return the number of classes of a classification head; 2 by default, as in transformers."""
        names = self.raw("id2label")
        return len(names) if isinstance(names, Mapping) and names else self.size("num_labels", 2)

    def unsupported(self, reason: str) -> Unsupported:
        return Unsupported(f"{self.name}: {reason}", hint=TRACE_HINT)

    def _missing(self, key: str) -> BadInput:
        written = self.aliases.get(key, key)
        return BadInput(
            f"{self.name}: its config.json has no '{written}'",
            hint=f'add "{written}" to the file; memfit does not guess a model\'s dimensions',
        )

    def _wrong(self, key: str, value: object, wanted: str) -> BadInput:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        written = self.aliases.get(key, key)
        return BadInput(f"{self.name}: '{written}' is {shown} in config.json", hint=f"it must be {wanted}")
