"""What the scripts of texts with images have of their own: messages with images, and the model's processor."""

from __future__ import annotations

from memfit.data.task_samples import COLUMNS
from memfit.frameworks.script_data import CHAT, READERS, ScriptKind, Setting, layouts
from memfit.frameworks.script_media import KEEP, read_folder
from memfit.nouns.plan import Plan

# for processors without a chat template, such as those of base models
_TEMPLATE = """\
# for processors without a chat template, such as those of base models; it is saved with the model
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '### ' + message['role'] + '\\n' }}"
    "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else 'IMAGE' }}{% endfor %}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
"""
_LOAD = '''\
def load(data: str) -> Dataset:
    """Return the columns of the first line of LAYOUTS that the data has: the images, then what is said of them."""
    rows = read(data)
    names = next((names for names in LAYOUTS if set(names) <= set(rows.column_names)), None)
    if names is None:
        raise SystemExit(f"{data} has the columns {rows.column_names}, but needs those of one line of LAYOUTS")
    image, *said = names
    kind = rows.features[image]
    many = isinstance(kind, List)
    rows = rows.cast_column(image, List(Image(decode=False)) if many else Image(decode=False))
    usable = rows.filter(lambda *values: all(value not in (None, "", []) for value in values), input_columns=said)
    few = usable.filter(lambda found: len(found) <= IMAGES, input_columns=[image]) if many else usable
    if left := len(rows) - len(few):
        print(f"warning: {data}: {left} of {len(rows)} rows have more than {IMAGES} images or no text: left out")
    return few.cast_column(image, List(Image()) if many else Image()).select_columns(list(names))


'''
_ENCODE = '''\
def load_processor(model: str) -> ProcessorMixin:
    """Return the model's processor, with a plain chat template if it has none."""
    processor = AutoProcessor.from_pretrained(model)
    processor.tokenizer.pad_token = processor.tokenizer.pad_token or processor.tokenizer.eos_token
    if processor.chat_template is None:
        print(f"warning: {model} has no chat template; CHAT_TEMPLATE is used, saved with the model, and needed to chat")
        mark = getattr(processor, "boi_token", None) or processor.image_token
        processor.chat_template = CHAT_TEMPLATE.replace("IMAGE", mark)
    return processor


def encode(samples: Dataset) -> Dataset:
    """Return messages with their images, which are read when they are used."""
    image, *said = samples.column_names
    names = ("messages",) if len(said) == 1 else ("prompt", "completion")

    def encoded(rows: dict) -> dict:
        pictures = [[fitted(one) for one in (found if isinstance(found, list) else [found])] for found in rows[image]]
        turns = [[turn(name, value) for value in rows[column]] for name, column in zip(names, said, strict=True)]
        return {"images": pictures, **dict(zip(names, turns, strict=True))}

    return samples.with_transform(encoded)


def turn(name: str, value: object) -> list[dict]:
    """Return messages; a text becomes one of the user, or of the assistant where it is a completion."""
    found = chat(value)
    role = "assistant" if name == "completion" else "user"
    return found if isinstance(found, list) else [{"role": role, "content": found}]


def fitted(picture: Picture) -> Picture:
    """Return an image that is no larger than IMAGE_SIZE, whose memory was planned."""
    small = picture.convert("RGB")
    small.thumbnail(IMAGE_SIZE)
    return small
'''


def _sizes(plan: Plan) -> list[Setting]:
    """Return the constants that hold the size of a text and of its images."""
    shape = plan.job.shape
    return [
        ("MAX_LENGTH", str(plan.recipe.sequence_length), "tokens, of images too; longer texts are cut"),
        ("IMAGES", str(shape.images), "of a sample at most"),
        ("IMAGE_SIZE", str(shape.image), "pixels; larger images are scaled down"),
    ]


PICTURES = ScriptKind(
    holds="hold images\n(or paths) and messages, or a prompt and its completion; or a folder with metadata.jsonl",
    data=_TEMPLATE + layouts(*COLUMNS["pictures"]) + READERS + _LOAD + read_folder("imagefolder") + CHAT,
    imports={
        "PIL.Image": ("Image as Picture",), "datasets": ("Image", "List"),
        "transformers": ("AutoProcessor", "ProcessorMixin"),
    },
    encode=_ENCODE,
    encoded="encode({})",
    processor="load_processor(args.model)",
    arguments=(KEEP,),
    packages=("pillow", "torchvision"),
    sizes=_sizes,
)  # fmt: skip
