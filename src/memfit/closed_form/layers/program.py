"""Block programs: the events of one block's forward and backward, the tensors it leaves, and its highest levels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers.block import forward as transformers_block
from memfit.closed_form.layers.encoder_decoder import BIAS, CROSS_BIAS, SOURCE, given
from memfit.closed_form.layers.linears import LayerRun
from memfit.closed_form.size import Basis, Size, added, covers, rows_of
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Layer
from memfit.nouns.tape import Role

PREFETCH = "block before, gathered ahead"  # label of a buffer beside the weights of the block that runs
REDUCTION = "reduction"  # label of the event at which whole gradients are copied into one buffer to be reduced
REDUCED = ("reduced gradients and their cast", "sharded gradients")  # the results of the reduction
INPUT, GRADIENT = 1, 2  # ids of the hidden states that come in and of the gradient of those that go out
CACHED = ("cached keys", "cached values")  # ends of labels, see attention.cached
WAITING = "waiting gradient of "  # begins the names of gradients that one column's programs leave to the other's
WEIGHTS = "attention's weights"  # name of what a block returns beside its output
TIED = "gradient of the table"  # name of a tied table's gradient, which the head hands to the embedding


@dataclass(frozen=True, eq=False)
class ProgramPart:
    """Consecutive events of a program, their peaks above the level at their start, and what they leave allocated."""

    events: tuple[int, ...]
    peaks: tuple[tuple[Size, int], ...]  # candidates for the highest level, with the event index
    left: Size  # level at the end relative to the start
    sizes: Mapping[int, Size]
    roles: Mapping[int, Role]
    product: int = -1  # events before the first cuBLAS product; -1: there is none

    @staticmethod
    def of(events: list[int], sizes: dict[int, dict[Basis, int]], roles: dict[int, Role]) -> ProgramPart:
        product = events.index(0) if 0 in events else -1
        events = [event for event in events if event]
        level: dict[Basis, int] = {}
        peaks: list[tuple[Size, int]] = [({}, -1)]
        last = len(events) - 1
        for i, id in enumerate(events):
            if id < 0:
                added(level, sizes[-id], -1)
                continue
            added(level, sizes[id])
            if i == last or events[i + 1] < 0:
                now = {k: v for k, v in level.items() if v}
                # the latest candidates are the most likely to cover `now`
                if not any(covers(p, now) for p, _ in reversed(peaks)):
                    peaks = [(p, j) for p, j in peaks if not covers(now, p)]
                    peaks.append((now, i))
        return ProgramPart(tuple(events), tuple(peaks), {k: v for k, v in level.items() if v}, sizes, roles, product)

    @property
    def marked(self) -> list[int]:
        """Return the events with a 0 at the first product of cuBLAS."""
        if self.product < 0:
            return [*self.events]
        return [*self.events[: self.product], 0, *self.events[self.product :]]

    @cached_property
    def left_by_role(self) -> dict[Role, dict[Basis, int]]:
        """Return `left` by role."""
        return by_role(self.events, self.sizes, self.roles)


def by_role(
    events: Iterable[int], sizes: Mapping[int, Size], roles: Mapping[int, Role]
) -> dict[Role, dict[Basis, int]]:
    """Return the level after `events`, by role."""
    split: dict[Role, dict[Basis, int]] = {}
    for id in events:
        added(split.setdefault(roles[abs(id)], {}), sizes[abs(id)], 1 if id > 0 else -1)
    return split


@dataclass(frozen=True, eq=False)
class Program:
    """A traced block. Ids are its own: INPUT and GRADIENT come in, `output` and `input_gradient` go out."""

    forward: ProgramPart
    leave: ProgramPart  # when the model's body returns, before the head
    exit: ProgramPart  # when the whole forward returns: the autocast region ends, the model's output is freed
    backward: ProgramPart
    sizes: dict[int, dict[Basis, int]]
    roles: dict[int, Role]
    labels: dict[int, str]
    output: int
    input_gradient: int  # 0: none
    lingering: Size  # see GraphRecorder.lingering
    attributes: tuple[int, ...] = ()  # see GraphRecorder.attributes; freed with the graph
    aside: tuple[int, int] = (0, 0)  # ids of the embedded text, into which images are written, and of its gradient
    # ids of tensors by their names: those that it gets from programs before it in time, and leaves to programs after it
    takes: Mapping[str, int] = field(default_factory=dict)
    hands: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def cached(self) -> tuple[int, ...]:
        """Return the ids of the keys and the values in a cache that outlives the forward."""
        return tuple(id for id, label in self.labels.items() if label.endswith(CACHED))


def recorder(style: Style) -> GraphRecorder:
    """Return a recorder set up for a style."""
    rec = GraphRecorder(style.autocast, style.grad, half=style.half)
    rec.decodes = style.decodes
    # under FSDP each micro-batch makes whole gradients anew
    rec.accumulating = style.accumulating and not style.shards and style.column != "second"
    rec.release_gradients = style.release_gradients and style.column != "second"
    if style.images:
        rec.units = rec.scratch = rows_of(style.images)
    return rec


def await_others(rec: GraphRecorder, second: Program) -> dict[str, int]:
    """Put what the program of the second column hands on into `rec.waiting`; return its ids here by name."""
    for name, id in second.hands.items():
        if name.startswith(WAITING):
            rec.waiting[name.removeprefix(WAITING)] = rec.new(second.sizes[id], 1, name, "gradients")
    return {WAITING + name: tensor.storage.id for name, tensor in rec.waiting.items() if tensor.storage}


def waiting_gradients(rec: GraphRecorder, style: Style) -> dict[str, int]:
    """Return the ids of the gradients that wait for those of the other column, by name."""
    found = rec.gradients if style.column == "second" else {}
    return {WAITING + name: tensor.storage.id for name, tensor in found.items() if tensor.storage}


def sharded(rec: GraphRecorder, style: Style, beside: int | None = None, more: int = 0) -> None:
    """FSDP's post-backward: whole gradients become shares, to which later micro-batches add.

    beside: for embedding and head, the bytes that exist during the reduction beyond those of their backward. Their one
    large gradient exists until the reduction returns (`unsharded_grad`, a loop variable of foreach_reduce). more:
    elements of gradients made before, which are reduced with these.
    """
    if not style.shards or not rec.gradients:
        return
    rec.buffer({}, REDUCTION)
    elements = sum(g.elements["1"] for g in rec.gradients.values()) + more
    received = -(-elements // style.shards)
    share = received * style.shard_gradient
    if beside is not None:
        rec.buffer({"1": max(received * style.weight + share + beside, 0)}, REDUCED[0])
    rec.gradients.clear()
    rec.kept = rec.new({"1": share}, 1, REDUCED[1], "gradients")
    if style.accumulating:
        rec.kept = None


def _of_decoder(basis: Basis) -> Basis:
    return basis if basis == "1" else ("decoder", basis, 0)


def finished(
    rec: GraphRecorder, parts: list[list[int]], output: int, received: Tensor | None, *,
    takes: Mapping[str, int] | None = None, hands: Mapping[str, int] | None = None,
) -> Program:  # fmt: skip
    """Return the program of four recorded parts; later frees are not recorded.

    Tensors passed between programs have the same role in both: hidden states are activations, gradients temporaries.
    """
    input_gradient = received.storage.id if received is not None and received.storage else 0
    if rec.decodes:
        rec.sizes = {id: {_of_decoder(basis): n for basis, n in size.items()} for id, size in rec.sizes.items()}
    rec.roles[INPUT] = rec.roles[output] = "activations"
    rec.roles[GRADIENT] = rec.roles[input_gradient] = "temporaries"
    forward, leave, exit, backward = (ProgramPart.of(events, rec.sizes, rec.roles) for events in parts)
    rec.events = []
    lingering: dict[Basis, int] = {}
    for id in rec.lingering:
        added(lingering, rec.sizes[id])
    attributes = tuple(sorted({t.storage.id for t in rec.attributes if t.storage}))
    return Program(
        forward, leave, exit, backward, rec.sizes, rec.roles, rec.labels, output, input_gradient, lingering,
        attributes, takes=takes or {}, hands=hands or {},
    )  # fmt: skip


@lru_cache(maxsize=4096)
def block_program(layer: Layer, style: Style, width: int) -> Program:
    """Trace one block under a style. Raises Unsupported for parts that are not modelled."""
    if style.holds_input and style.input_grad and not style.first:
        plain = block_program(layer, replace(style, holds_input=False), width)
        if -INPUT not in plain.forward.events:  # the graph holds the input anyway, so its holder changes nothing
            return plain
    rec = recorder(style)
    x = rec.new({"T": width}, style.residual, "hidden states")
    wide = 4 if style.widens else style.residual
    gradient = [rec.new({"T": width}, wide, "gradient of the block's output")]
    given(rec, layer, style, width)
    outside = [] if style.first else [*rec.shared.values()]  # other programs free them
    takes = {f"gradient of the {name}": id for name, id in _ids(rec.sums).items()}
    takes |= _ids(rec.shared) if style.first else {}
    if style.column == "first":
        takes |= await_others(rec, block_program(layer, replace(style, column="second"), width))
    before = _weights_before(rec, layer, style, width)
    takes |= _ids({WEIGHTS: before} if before else {})
    rec.taken()
    x.requires_grad = style.grad and style.input_grad
    rec.attributes += [t.detach() for id, t in ((INPUT, x), (GRADIENT, gradient[0])) if id in style.unit_holds]
    block = LayerRun(rec, layer, style, width)
    out, kept, saves = _run_forward(block, x)
    weights, block.held = block.held, []
    del before
    held = x if style.holds_input else None
    del x
    forward = rec.taken()
    del held
    if style.last:
        weights.clear()
    arguments = style.checkpointing != "none"  # checkpointed blocks keep what they share until their backward
    _drop_biases(rec, style.first and not arguments)
    leave = rec.taken()
    rec.exit_autocast()
    exits = rec.taken()
    if not arguments:
        rec.shared.clear()
    unsaved = {SOURCE: takes[SOURCE]} if rec.taken() else {}  # the head frees what no block has saved
    output = out.storage.id if out.storage else 0
    # a leaf that asks for a gradient and that gradient live as long as the graph
    rec.attributes += [rec.shared[CROSS_BIAS]] if style.first and CROSS_BIAS in rec.shared else []
    _drop_biases(rec, style.first)
    result = _run_backward(block, out, kept, saves, gradient) if style.grad else None
    del out
    rec.shared.clear()
    rec.attributes += filter(None, rec.inputs.pop(CROSS_BIAS, [])) if style.first else []
    sums = {f"gradient of the {name}": held[0] for name, held in rec.inputs.items() if name != "input" and held[0]}
    sharded(rec, style)
    backward = [event for event in rec.taken() if event != -output] if style.grad else []
    if style.prefetches and style.grad:
        backward = _prefetched(rec, style, backward)
    hands = _ids(sums) | unsaved | waiting_gradients(rec, style)
    hands |= _ids({WEIGHTS: weights[0]} if weights else {})
    made = finished(rec, [forward, leave, exits, backward], output, result, takes=takes, hands=hands)
    del outside, weights
    return made


def _ids(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.storage.id for name, tensor in tensors.items() if tensor.storage}


def _weights_before(rec: GraphRecorder, layer: Layer, style: Style, width: int) -> Tensor | None:
    """Return what the block before has returned beside its output; None where it hands nothing on."""
    if style.first or not style.hands_weights:
        return None
    made = block_program(layer, replace(style, first=True, last=False), width)
    return rec.new(made.sizes[made.hands[WEIGHTS]], 1, WEIGHTS, "activations") if WEIGHTS in made.hands else None


def _drop_biases(rec: GraphRecorder, ended: bool) -> None:
    """Drop the biases that a stack's variables hold, if it has ended."""
    for name in (BIAS, CROSS_BIAS) if ended else ():
        rec.shared.pop(name, None)


def _run_forward(block: LayerRun, x: Tensor) -> tuple[Tensor, list[Tensor], int]:
    """Return the output, the tensors that checkpointing keeps, and the number of saved tensors."""
    rec, style = block.rec, block.style
    rec.keep = style.checkpointing == "none"
    kept: list[Tensor] = _policy(block) if style.grad and style.checkpointing == "selective" else []
    out = (style.code.block or transformers_block)(block, x)
    saves, rec.saves, rec.keep = rec.saves, 0, True
    if style.grad and style.checkpointing in ("full", "selective"):
        rec.roles[INPUT] = "activations"
        kept.append(x.detach())
    return out, kept, saves


def _policy(block: LayerRun) -> list[Tensor]:
    """Return the tensors that TRL's selective policy saves: the outputs of a fused attention kernel, needed or not."""
    rec, style, a = block.rec, block.style, block.layer.attention
    if a.kind == "linear" or style.kernel in ("math", "eager"):
        return []
    width = style.autocast or style.residual
    return [
        rec.new({"T": a.heads * a.value_dim}, width, "attention output", "activations"),
        rec.new({"T": a.heads}, 4, "log-sum-exp", "activations"),
    ]


def _run_backward(
    block: LayerRun, out: Tensor, kept: list[Tensor], saves: int, gradient: list[Tensor]
) -> Tensor | None:
    """Run the backward; checkpointing first runs the forward again, up to its last saved tensor."""
    rec, style = block.rec, block.style
    if style.checkpointing == "none":
        root = Tensor(None, out.elements, out.itemsize, True, out.grad_fn)
        del out
        return rec.backward(root, gradient)
    x = kept.pop() if kept else rec.new({"T": block.width}, style.residual, "hidden states fetched back", "activations")
    kept.clear()  # the recomputation below allocates again what the policy saved
    x.requires_grad = style.input_grad
    if style.reentrant:
        del out
        return _reentrant(block, x, gradient)
    root = Tensor(None, out.elements, out.itemsize, True, out.grad_fn)
    del out
    left, waiting = rec.run_ahead(root, gradient)
    del root
    rec.stop_at, held = saves, len(rec.attributes)
    again = (style.code.block or transformers_block)(block, x)
    rec.stop_at, rec.silent = None, False
    del rec.attributes[held:]  # the recomputed graph is gone; only its saved tensors were kept
    rec.exit_autocast()
    rec.recomputed = True
    del again
    block.held.clear()
    result = rec.resume(left, waiting)
    del x
    return result


def _reentrant(block: LayerRun, x: Tensor, gradient: list[Tensor]) -> Tensor | None:
    """Return the input's gradient by CheckpointFunction.backward, which runs the whole block, then its backward."""
    rec = block.rec
    rec.forgotten, held = [], len(rec.attributes)
    again, arguments = (block.style.code.block or transformers_block)(block, x), gradient[0]
    del rec.attributes[held:]
    rec.exit_autocast()
    result = rec.backward(again, gradient)
    del again, arguments, x
    block.held.clear()
    return result


def _prefetched(rec: GraphRecorder, style: Style, backward: list[int]) -> list[int]:
    """Return the events of a backward in which FSDP1 gathers the block before as soon as the first adapter is reached.

    PEFT makes every adapter matrix a unit of its own (fsdp_auto_wrap_policy), and each unit's backward gathers the one
    whose forward ran before: the first matrix's is the block before (torch 2.13, _runtime_utils.py, _prefetch_handle).
    """
    adapters = [i for i, event in enumerate(backward) if event > 0 and "lora_A gradient" in rec.labels[event]]
    at = adapters[-1] if adapters else len(backward)
    id = len(rec.sizes) + 1
    rec.sizes[id], rec.roles[id], rec.labels[id] = {"1": style.unit}, "temporaries", PREFETCH
    return [*backward[:at], id, *backward[at:], -id]
