"""The tensors that stay on the card between steps: weights, adapters, quantised payload and scales, states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from memfit.closed_form.numerics import MAGNITUDE, Numerics, adapted, adapter_weights, has_adapter, saved_ends, seen
from memfit.closed_form.task_runs import second_model
from memfit.nouns.architecture import Architecture, Weight
from memfit.nouns.job import Recipe
from memfit.tables.cuda_kernels import reduction
from memfit.tables.optimizers import Optimizer
from memfit.tables.quantization import CHECKPOINTS, QUANTIZATIONS, Quantization
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import Trainer


@lru_cache(maxsize=64)
def with_rotary_caches(a: Architecture, itemsize: int) -> Architecture:
    """Return the model with the cosines and sines of all positions, which every layer of older classes stores."""
    widths = [layer.attention.rotary_dim for layer in a.layers] if a.max_positions else []
    tables = tuple(2 * (a.max_positions or 0) * width * itemsize for width in widths if width)
    return replace(a, buffers=(*a.buffers, *tables))


@dataclass(frozen=True, slots=True)
class Stored:
    """One weight as it is loaded: the tensors that stay, and what is freed once it is converted."""

    stays: tuple[int, ...]
    passing: tuple[int, ...] = ()  # bytes of each tensor
    widened: int = 0  # bytes of the copy that replaces it when everything is loaded
    place: int = 0  # in the model, in whose order such copies are made, and DDP sends the weights
    width: int = 0  # bytes of one of its elements in the end
    made: int = 0  # bytes of the wider tensor in its place, from when all adapters are made until the trainer casts it
    added: bool = False  # made when all weights are loaded and converted


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """Everything that is not an activation, in bytes unless a field says elements."""

    base: int  # weights as stored (payload alone when quantised)
    buffers: int  # of modules, beside their weights
    scales: int  # block scales and tables of a quantised base
    upcast: int  # added by prepare_model_for_kbit_training's fp32 copies
    adapter: int
    saved: int  # trained copies of whole modules, beside the frozen originals in `base`
    master: int
    gradients: int  # of all trained weights together
    states: int
    trained: int  # elements that get a gradient
    parameters: int  # elements of the base
    quantised: int  # elements of the base that are quantised
    largest: int  # elements of the largest weight, as a rule the embedding or the head
    adapted: tuple[Weight, ...]  # see `_adapted`
    stored: tuple[Stored, ...]
    beside: int  # a second model of the same weights, which are not trained
    passing: int  # the most that exists only while a weight is converted
    loading: int  # the most beside `weights` while all of them are loaded on one card
    multiplies: bool  # cuBLAS runs while adapters are made
    state_tensors: tuple[tuple[int, ...], ...]
    paged: int  # states in managed memory, which are not in `states`
    step_groups: tuple[tuple[int, ...], ...]  # temporaries of optimizer.step(), see Optimizer.step_temporaries
    step_bytes: int  # the most of these temporaries at one instant

    @property
    def weights(self) -> int:
        """Return the bytes of all weights on the card."""
        own = self.base + self.buffers + self.scales + self.upcast + self.adapter + self.saved
        return own + self.master + self.beside


@lru_cache(maxsize=512)
def static_bytes(
    architecture: Architecture, method: str, quantization: str, rank: int, targets: tuple[str, ...], n: Numerics,
    optimizer: Optimizer, embeddings_32bit: bool, decayed_first: bool, saved: tuple[str, ...] = (),
    card: tuple[int, int] | None = None,
) -> Static:  # fmt: skip
    """Return the exact bytes of one way to store and train a model; cached, because a search repeats the same few.

    card: multiprocessors and the threads of each, for the buffers of an optimizer that takes means of whole weights.
    """
    linears = {id(w) for layer in architecture.layers for w in layer.weights if w.kind == "linear" and not w.whole}
    linears |= {id(w) for part in seen(architecture) for w in part if w.kind == "linear"}
    if n.quantised_head:
        linears |= {id(w) for w in architecture.head if w.kind == "linear"}
    row = (QUANTIZATIONS | CHECKPOINTS).get(quantization) if method == "qlora" else None
    stored, base, scales, upcast, quantised, largest = [], 0, 0, 0, 0, 0
    weights = architecture.weights
    for at in arrival(architecture, method):
        w = weights[at]
        largest = max(largest, w.numel)
        if row is not None and id(w) in linears:
            passing = () if quantization in CHECKPOINTS else row.passing(w.numel, n.weight)
            stored.append(Stored(row.tensors(w.numel, w.shape[0]), passing, place=at, width=1))
            base += row.payload(w.numel)
            scales += row.scales(w.numel, w.shape[0])
            quantised += w.numel
        else:
            arriving = n.whole if row is not None and w.whole else n.weight
            width = max(n.other, arriving) if row is not None else n.weight
            widened = w.numel * width if width != arriving else 0
            stored.append(Stored((w.numel * arriving,), (), widened, at, width))
            base += w.numel * arriving
            upcast += w.numel * (width - arriving)
    stored += [Stored((size,), place=len(weights)) for size in architecture.buffers]
    trained = trained_weights(architecture, method, rank, targets, n, saved)
    adapter = copies = 0
    if method != "full":
        ends = [w for part in saved_ends(architecture, saved) for w in part]
        added = [w for w in trained if w[0] not in ends]  # PEFT copies whole modules after it has made all adapters
        names = adapted(architecture, targets)
        first = next((at for at, w in enumerate(weights) if has_adapter(w, names)), 0)
        new = (*added, *((w, n.saved) for w in ends))
        for number, (w, size) in enumerate(new):
            made = w.numel * n.made if size < n.made else 0
            norms: tuple[int, ...] = ()
            if w.module == MAGNITUDE and n.adapts_on_card:
                norms = _for_norms(w.numel, new[number - 2][0].shape[-1], row, n)
            stored.append(Stored((w.numel * size,), norms, place=first, width=size, made=made, added=True))
        adapter = sum(w.numel * size for w, size in added)
        copies = sum(w.numel * n.saved for w in ends)
    if n.master:
        stored += [Stored((w.numel * n.master,), added=True) for w, _ in trained]
    second = method == "full" and second_model(architecture)
    beside = stored[: len(weights) + len(architecture.buffers)] if second else []
    trained = in_groups(trained, decayed_first)
    sizes = [(w.numel, size) for w, size in trained]
    means = _means(trained, *card) if card and optimizer.factored else ()
    wide = _wide_states(optimizer, embeddings_32bit)
    states = _state_tensors(trained, optimizer, n, wide)
    return Static(
        base=base, buffers=sum(architecture.buffers), scales=scales, upcast=upcast, adapter=adapter, saved=copies,
        master=sum(w.numel * n.master for w, _ in trained),
        gradients=sum(w.numel * size for w, size in trained), states=sum(map(sum, states)),
        trained=sum(w.numel for w, _ in trained), parameters=architecture.parameters, quantised=quantised,
        largest=largest,
        adapted=_adapted(architecture, method, targets),
        stored=(*stored, *beside), beside=sum(size for item in beside for size in item.stays),
        passing=max((sum(s.passing) or sum(s.stays) * bool(s.widened) for s in stored), default=0),
        loading=_loading(stored), multiplies=any(s.added and s.passing for s in stored),
        state_tensors=states,
        paged=sum((wide if w.kind == "embedding" else optimizer).paged_bytes(w) for w, _ in trained),
        step_groups=optimizer.step_temporaries(sizes, means), step_bytes=optimizer.step_bytes(sizes, means),
    )  # fmt: skip


def arrival(architecture: Architecture, method: str) -> list[int]:
    """Return the indices of the weights in the order they are loaded: a quantised model's are sorted by name."""
    if method != "qlora":
        return list(range(len(architecture.weights)))
    names = [name.split(".") for name, _ in architecture.named]
    # transformers' dot_natural_key sorts "layers.10.mlp" after "layers.9.mlp"
    keys = [[(0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in name] for name in names]
    return sorted(range(len(keys)), key=keys.__getitem__)


def trained_weights(
    architecture: Architecture, method: str, rank: int, targets: tuple[str, ...], n: Numerics,
    saved: tuple[str, ...] = (),
) -> list[tuple[Weight, int]]:  # fmt: skip
    """Return (weight, bytes per element) of everything that gets a gradient."""
    if method == "full":
        return [(w, n.weight) for w in architecture.weights if not w.fixed]
    names = adapted(architecture, targets)
    new = new_weights(architecture)
    head = tuple(w for w in architecture.head if w not in new)
    parts = [architecture.embedding, *(layer.weights for layer in architecture.layers), head]
    parts += seen(architecture)
    adapters = [w for weights in parts for w in adapter_weights(weights, names, rank, n.magnitude > 0)]
    widths = [n.magnitude if w.module == MAGNITUDE else n.adapter for w in adapters]
    first, last = ([(w, n.saved) for w in part] for part in saved_ends(architecture, saved))
    return [*first, *zip(adapters, widths, strict=True), *((w, n.other) for w in new), *last]


def new_weights(architecture: Architecture) -> tuple[Weight, ...]:
    """Return the weights of the head that no checkpoint has, copies of which are trained whole beside adapters."""
    modules = TASKS[architecture.trained_for].new_modules
    return tuple(w for w in architecture.head if not set(w.name.split(".")).isdisjoint(modules))


def in_groups(trained: list[tuple[Weight, Any]], decayed_first: bool) -> list[tuple[Weight, Any]]:
    """Return the trained weights in the optimizer's order.

    transformers puts norms and biases, which have no weight decay, in a second group.
    """
    return sorted(trained, key=lambda item: item[0].kind in ("norm", "bias")) if decayed_first else trained


def _wide_states(optimizer: Optimizer, embeddings_32bit: bool) -> Optimizer:
    """Return the optimizer of embeddings, for which transformers asks bitsandbytes' 8-bit ones for 32-bit states."""
    wide = embeddings_32bit and optimizer.package == "bitsandbytes" and optimizer.width == 1
    return optimizer.in_32bit() if wide else optimizer


def _state_tensors(
    trained: list[tuple[Weight, int]], optimizer: Optimizer, n: Numerics, wide: Optimizer
) -> tuple[tuple[int, ...], ...]:
    """Return the state tensors of each trained weight, after a first entry with the tables they share, if any."""
    tensors: list[tuple[int, ...]] = [(optimizer.tables,)] if optimizer.tables else []
    for w, size in trained:
        if wide is not optimizer and w.kind == "embedding":
            tensors.append(wide.state_tensors(w, 4))
        else:
            tensors.append(optimizer.state_tensors(w, 4 if n.master else size))
    return tuple(tensors)


def _means(trained: Sequence[tuple[Weight, int]], multiprocessors: int, threads: int) -> list[int]:
    """Return the bytes of the staging buffer of the mean over the rows of each weight's update."""
    found = []
    for w, _ in trained:
        rows, columns = w.shape if len(w.shape) == 2 else (0, 0)
        buffers = reduction(rows, columns, fastest=False, multiprocessors=multiprocessors, threads=threads)
        found.append(buffers[0] if buffers else 0)
    return found


def static_of(
    a: Architecture, r: Recipe, n: Numerics, o: Optimizer, t: Trainer, card: tuple[int, int] | None = None
) -> Static:
    """Return `static_bytes` of a recipe.

    A sharded optimizer takes means of parts of weights, for which no buffer is counted. DeepSpeed steps flat tensors,
    in which bitsandbytes finds no embedding to keep in 32 bits.
    """
    embeddings_32bit = t.embeddings_32bit and not r.zero
    return static_bytes(
        a,
        r.method,
        r.quantization,
        r.lora_rank,
        r.lora_targets,
        n,
        o,
        embeddings_32bit,
        t.decayed_first,
        r.modules_to_save,
        card if r.shard == "none" else None,
    )


def _adapted(architecture: Architecture, method: str, targets: tuple[str, ...]) -> tuple[Weight, ...]:
    """Return the weights that have adapters, in one block of every kind."""
    if method == "full":
        return ()
    names = adapted(architecture, targets)
    return tuple(w for layer in architecture.kinds for w in layer.weights if has_adapter(w, names))


def _for_norms(out: int, ins: int, row: Quantization | None, n: Numerics) -> tuple[int, ...]:
    """Return the tensors that DoRA's magnitudes of a weight [out, ins] are made with.

    They are the norms of the weight plus the scaled product of the factors. A 4-bit weight is copied and dequantised,
    and its factors have the dtype of the computation; LLM.int8()'s is dequantised in fp32, as its factors are.
    Source: PEFT 0.21, DoraLinearLayer.update_layer.
    """
    numel = out * ins
    if row is None:
        return (numel * n.weight,) * 3
    if row.key == "int8":
        return (numel * 4,) * 4
    tensors, product = row.tensors(numel, out), numel * (n.autocast or n.weight)
    return (*tensors[1:], *tensors, numel * n.weight, product, product, max(product, numel * n.weight))


def _loading(stored: Sequence[Stored]) -> int:
    """Return the most bytes beside those of `stored` while it is loaded, in the order of `timeline.load`."""
    wide = [item for item in stored if item.made]
    steps = [  # what comes, and what goes then
        *((sum(item.passing) + sum(item.stays), sum(item.passing)) for item in stored if not item.added),
        *((item.widened, item.stays[0]) for item in stored if item.widened),
        *((sum(item.passing) + sum(item.stays), sum(item.passing)) for item in stored if item.added),
        *((item.made, item.stays[0]) for item in wide), *((item.stays[0], item.made) for item in wide),
    ]  # fmt: skip
    now = most = 0
    for comes, goes in steps:
        most = max(most, now + comes)
        now += comes - goes
    return most - now
