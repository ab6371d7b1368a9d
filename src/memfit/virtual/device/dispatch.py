"""The kernels of the virtual card: one Python function behind PyTorch's dispatch key CUDA, computing shapes only."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, empty, zeros  # by value: DeepSpeed puts its own in torch's place
from torch._C import DispatchKey

from memfit.virtual.device.ledger import UNNAMED
from memfit.virtual.device.native_functions import delegates, missing, operator, registered, shadowed, structured, title
from memfit.virtual.device.shapes import Shapes, blueprint
from memfit.virtual.device.storage import LOCK
from memfit.virtual.device.temporaries import GEMMS, HOST_OUTPUTS, SCRIPTS
from memfit.virtual.device.values import LARGEST, Number, base, keeps, of_constants, tensors

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card


# --- operators with a kernel of their own: factories, copies, resizing, reads of data ---

Args = tuple[Any, ...]
Words = dict[str, Any]
Handler = Callable[["Card", Any, Args, Words], Any]


def contiguous(shape: Any) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _on_named_device(card: Card, kwargs: Words) -> None:
    """Make the device that a factory names by its index the current one until its kernel is done."""
    device = kwargs.get("device")
    if device is not None and device.index is not None and device.index != card.index:
        card.use(device.index)


def _empty(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    _on_named_device(card, kwargs)
    shape, layout = tuple(args[0]), kwargs.get("memory_format")
    if layout is None or layout in (torch.contiguous_format, torch.preserve_format):
        stride = contiguous(shape)
    else:
        stride = empty(shape, device="meta", memory_format=layout).stride()
    made = card.tensor((shape, stride, kwargs.get("dtype") or torch.get_default_dtype()), UNNAMED)
    card.values.mark_unwritten(made)
    return made


def _empty_strided(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    _on_named_device(card, kwargs)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return card.tensor((tuple(args[0]), tuple(args[1]), dtype), UNNAMED)


def _copy(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    """Do copy_ from host to card, from card to host, or within the card."""
    self, source = args[0], args[1]
    if self.is_cuda:
        card.ledger.rename(base(self), "copy")
        value = card.values.of(source) if keeps(self) and keeps(source) else None
        number = card.values.constant(source) if value is None else None
        put = card.values.pattern(source) if self.dtype == torch.bool else None
        if number is not None:
            _hold(card, self, torch.full((), number, dtype=source.dtype, device="cpu").to(self.dtype).item())
        elif put is not None and keeps(self):
            card.values.set(self, put)
        elif value is None:
            card.values.unknown(self)
        else:
            card.values.set(self, value)
        return self
    value = card.values.of(source) if keeps(source) else None
    if value is not None:
        return self.copy_(value)
    if (number := card.values.constant(source)) is not None:
        return card.answers.known_to_host(self, number)
    return card.answers.to_host(self)


def _resize(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    self, shape = args[0], tuple(args[1])
    need = self.element_size() * max(torch.Size(shape).numel(), 0) + self.storage_offset() * self.element_size()
    storage = self.untyped_storage()
    held = card.values.of(self) if keeps(self) and self.numel() else None
    if need > storage.nbytes():
        fresh = card.tensor((shape, contiguous(shape), self.dtype), "resize_")
        storage, offset = fresh.untyped_storage(), 0
    else:
        offset = self.storage_offset()
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
        DispatchKey.CPU, self, storage, offset, shape, contiguous(shape)
    )
    if held is not None and keeps(self) and self.numel() >= held.numel():  # what the memory held is copied
        card.values.begin(self)
        if (now := card.values.of(self)) is not None:
            now.view(-1)[: held.numel()].copy_(held.reshape(-1))
    return self


def _set(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    if op._overloadname == "source_Tensor":
        source = args[1]
        args = (args[0], source.untyped_storage(), source.storage_offset(), source.shape, source.stride())
    elif op._overloadname == "source_Storage":
        count = args[1].nbytes() // args[0].element_size()
        args = (args[0], args[1], 0, (count,), (1,))
    return torch.ops.aten.set_.source_Storage_storage_offset._op_dk(DispatchKey.CPU, *args)


def _item(card: Card, op: Any, args: Args, kwargs: Words) -> Any:
    value = card.values.of(args[0])
    return card.answers.item(args[0]) if value is None else value.item()


def _nonzero(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    mask = args[0]
    value = card.values.of(mask) if keeps(mask) else None
    found = torch.nonzero(value) if value is not None else card.answers.nonzero(mask)
    # the kernel writes one row per dimension and returns its transpose
    shape = tuple(found.shape)
    out = card.tensor((shape, (1, max(shape[0], 1)), torch.int64), "nonzero")
    card.values.set(out, found)
    return out


def _equal(card: Card, op: Any, args: Args, kwargs: Words) -> bool:
    a, b = (card.values.of(t) if keeps(t) else None for t in args[:2])
    return True if a is None or b is None else torch.equal(a, b)


def _grown(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    """Do im2col and col2im, which begin with a result as large as the input and resize it (Im2Col.cu, Col2Im.cu)."""
    x = args[0]
    out = card.tensor((tuple(x.shape), contiguous(x.shape), x.dtype), title(str(op)))
    return out.resize_(SHAPES(op, args, kwargs)[0])


def _multinomial(card: Card, op: Any, args: Args, kwargs: Words) -> Any:
    """Draw one number of each row, or several without replacement, as Distributions.cpp composes it."""
    x, count, replacement = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("replacement", False)
    if replacement and count > 1:
        return _functional("aten.multinomial.default")(card, op, args, kwargs)
    out = empty((*x.shape[:-1], count), dtype=torch.int64, device="cuda")
    high = x.max()
    below = high < math.inf
    low = x.min()
    above = low >= 0
    valid = below & above
    del above, low, below, high
    total = x.sum(-1)
    empties = total == 0
    none = empties.any()
    del empties, total
    _ = none.logical_not()
    del _
    scores = torch.empty_like(x).exponential_()
    torch.div(x, scores, out=scores)
    if count == 1:
        torch.argmax(scores, -1, True, out=out)
    else:
        out.copy_(scores.topk(count)[1])
    del scores, none, valid
    return out


OWN_KERNELS: dict[str, Handler] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "copy_": _copy,
    "resize_": _resize,
    "set_": _set,
    "_local_scalar_dense": _item,
    "nonzero": _nonzero,
    "equal": _equal,
    "im2col": _grown,
    "col2im": _grown,
    "multinomial": _multinomial,
    "record_stream": lambda *_: None,
    "is_pinned": lambda *_: False,
    "_nested_tensor_from_mask_left_aligned": lambda *_: False,  # TransformerEncoder then keeps its padded, larger path
    **{f"_use_{lib}_ctc_loss{kind}": lambda *_: False for lib in ("cudnn", "miopen") for kind in ("", ".Tensor")},
}


# --- all operators ---

_REGISTERED: list[torch.library.Library] = []
_CARD: list[Card] = []  # the active one, last
SHAPES = Shapes()


def current() -> Card:
    """Return the active card. Raises RuntimeError if there is none."""
    if not _CARD:
        raise RuntimeError("a tensor of a virtual GPU is used after its `with virtual_gpu(...)` ended")
    return _CARD[-1]


def after_kernel(*arguments: Any) -> None:
    """Forget which tensors of a foreign kernel, given as such or by address, are constant: it may write to any."""
    if not _CARD or not _CARD[-1].values.constants:
        return
    for t in tensors(arguments):
        if t.is_cuda:
            _CARD[-1].values.not_constant(t)
    for x in arguments:
        if isinstance(x, int | ctypes.c_void_p):
            _CARD[-1].values.constants.pop(x if isinstance(x, int) else x.value or 0, None)


def activate(card: Card) -> None:
    """Make `card` the one that all `cuda` tensors lie on."""
    _register()
    _CARD.append(card)


def deactivate(card: Card) -> None:
    """Undo `activate`."""
    _CARD.remove(card)


def _register() -> None:
    """Register `_kernel`, once per process, for every CUDA operator that this build has no kernel for."""
    if _REGISTERED:
        return
    missing()  # cached before there is a fallback
    everything, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns of every kernel that is replaced
        for name in dict.fromkeys((*registered(), *shadowed())):
            own.impl(name, bound(operator(name)), "CUDA")
    everything.fallback(_kernel, "CUDA")
    own.impl("scaled_dot_product_attention", _sdpa, "AutogradCUDA")
    own.impl("scaled_dot_product_attention", _sdpa, "CUDA")
    _REGISTERED.extend([everything, own])


def register_by_name() -> None:
    """Register every operator by its name too.

    Under a mode that is active but skipped, such as the compiler's `no_dispatch`, PyTorch ignores fallbacks.
    """
    if len(_REGISTERED) > 2:
        return
    named = torch.library.Library("aten", "IMPL")
    for name in missing():
        named.impl(name, bound(operator(name)), "CUDA")
    _REGISTERED.append(named)


def bound(op: Any) -> Callable[..., Any]:
    """Return the kernel of one operator."""
    return lambda *args, **kwargs: _kernel(op, *args, **kwargs)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    from memfit.virtual.device.attention import sdpa

    capability = current().capability
    return sdpa(capability, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    card = current()
    handler = _HANDLERS.get(op)
    if handler is None:
        handler = _HANDLERS[op] = _handler(op)
    with LOCK:
        if card.ledger.read:
            at = card.ledger.number_at
            card.ledger.read([at[address] for t in tensors(args) if t.is_cuda and (address := base(t)) in at])
        before = card.storages.index
        if len(card.indices) > 1:  # results lie where the first argument does
            first = next((t for t in tensors(args) if t.is_cuda), None)
            if first is not None and first.get_device() != before:
                card.use(first.get_device())
        try:
            return handler(card, op, args, kwargs)
        finally:
            if card.storages.index != before:
                card.use(before)


def _handler(op: Any) -> Handler:
    """Choose an operator's handler by its name or else by its schema."""
    schema = op._schema
    delegate = delegates().get(str(op).removeprefix("aten.").removesuffix(".default"))
    if delegate and schema.name.startswith("aten::"):  # only builds with CUDA kernels dispatch these
        return _delegated(operator(delegate), schema.name.endswith("_"))
    own = OWN_KERNELS.get(schema.name.removeprefix("aten::")) or OWN_KERNELS.get(str(op).removeprefix("aten."))
    if own:
        return own
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return _view
    outs = [a.name for a in schema.arguments if a.is_out]
    if outs:
        trusted = str(op).removeprefix("aten.").replace(".default", "") in structured()
        return _into(outs, trusted or not schema.returns, str(op), _without_out(op))
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return _in_place(str(op), schema)
    if torch.Tag.dynamic_output_shape in op.tags:
        return _dynamic
    return _functional(str(op))


def _delegated(out_op: Any, in_place: bool) -> Handler:
    """Run a structured operator as PyTorch's generated code does: shapes, outputs, then the kernel that fills them."""
    names = [a.name for a in out_op._schema.arguments if a.is_out]

    def run(card: Card, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.dynamic_output_shape in op.tags:
            args = (args[0], _expanded(args[1]), *args[2:])
        made = args[0] if in_place else card.tensors(SHAPES(op, args, kwargs), UNNAMED)
        outs = dict(zip(names, made if isinstance(made, tuple) else (made,), strict=True))
        _kernel(out_op, *args, **kwargs, **outs)
        return made

    return run


def _expanded(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Turn masks into indices, as the shape function of `index` does first (expandTensors of IndexingUtils.h)."""
    found: list[Tensor | None] = []
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        found += index.nonzero().unbind(1) if masks and index is not None else [index]
    return found


def _without_out(op: Any) -> Any:
    """Return `index.Tensor` for `index.Tensor_out`; the operator itself where there is no such overload."""
    packet = op.overloadpacket
    overload = op._overloadname.removesuffix("_out").removesuffix("out") or "default"
    return getattr(packet, overload) if overload in packet.overloads() else op


def _dynamic(card: Card, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose output shape depends on data on the host, with defaults for unknown values."""
    known = card.values.run(op, args, kwargs)
    result = known if known is not None else op(*card.answers.stand_in(card.values, args), **kwargs)
    out = card.tensors(blueprint(result), title(str(op)))
    if known is not None:
        for t, value in zip(tensors(out), tensors(known), strict=True):
            card.values.set(t, value)
    return out


def _view(card: Card, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the CPU kernel of a view, which reads sizes and strides only, whatever the device."""
    return op._op_dk(DispatchKey.CPU, *args, **kwargs)


def _functional(name: str) -> Handler:
    script, gemm, label, on_host = SCRIPTS.get(name), name in GEMMS, title(name), HOST_OUTPUTS.get(name)

    def run(card: Card, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        planned = SHAPES(op, args, kwargs)
        if on_host:
            apart = on_host(card, args)
            planned = [empty(p[0], dtype=p[2]) if i in apart else p for i, p in enumerate(planned)]
        order = script(card, args, kwargs) if script else ()
        out = card.scripted(planned, order, label) if order else card.tensors(planned, label)
        if gemm:
            card.need_workspace()
        _know(card, op, args, kwargs, out)
        return out

    return run


def _into(outs: list[str], trusted: bool, name: str, plain: Any) -> Handler:
    """Run an `out=` variant of `plain`. Unless `trusted`, its output may have another shape and is resized."""
    script, gemm, label = SCRIPTS.get(name), name in GEMMS, title(name)

    def run(card: Card, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = list(tensors([kwargs[n] for n in outs]))
        for t in out:
            card.ledger.rename(base(t), label)
        if not trusted or (not out[0].numel() and torch.Tag.dynamic_output_shape not in plain.tags):
            planned = SHAPES(op, args, kwargs)
            for t, (shape, _, _) in zip(out, planned if len(out) > 1 else [planned], strict=True):
                if tuple(t.shape) != shape:
                    t.resize_(shape)
        if script:
            card.touch(script(card, args, kwargs), f"inside {label}")
        if gemm:
            card.need_workspace()
        read = {base(t) for t in tensors(args) if keeps(t)}  # x.mul_(y) runs as mul.out(x, y, out=x)
        _know_written(card, op, args, kwargs, out, not any(base(t) in read for t in out if keeps(t)))
        return None if not op._schema.returns else out[0] if len(out) == 1 else tuple(out)

    return run


def _in_place(name: str, schema: Any) -> Handler:
    script, gemm, label = SCRIPTS.get(name), name in GEMMS, title(name)
    overwrites = schema.name in _OVERWRITES
    beside = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write][1:]
    returns, returns_self = len(schema.returns), bool(schema.returns and schema.returns[0].alias_info)

    def run(card: Card, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if script:
            card.touch(script(card, args, kwargs), f"inside {label}")
        if gemm:
            card.need_workspace()
        first = args[0]
        if isinstance(first, Tensor):
            if overwrites:  # zeros_like calls empty_like, then zero_
                card.ledger.rename(base(first), label.rstrip("_"))
            _know_written(card, op, args, kwargs, [first], overwrites)
        elif first and isinstance(first, list | tuple):
            _know_written(card, op, args, kwargs, list(tensors(first)), overwrites)
        if card.values.constants:  # a fused optimizer also writes its states
            for i, argument in beside:
                for t in tensors(args[i] if i < len(args) else kwargs.get(argument)):
                    card.values.not_constant(t)
        if not returns:
            return None
        if returns_self:
            return first
        planned = SHAPES(op, args, kwargs)
        return card.tensors(planned, label)

    return run


def _know(card: Card, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Compute the result on the host as well when all inputs are known there."""
    card.answers.mark_finite_tests(card.values, op, args, out)
    if card.values.constants and isinstance(out, Tensor) and not all(keeps(t) for t in (out, *tensors(args))):
        number = of_constants(card.values, op, args, kwargs, out.numel())
        if number is not None:
            _hold(card, out, number)
            return
    made = [t for t in tensors(out) if keeps(t)]
    if not made:
        return
    result = None if any(not keeps(t) for t in tensors(args)) else card.values.run(op, args, kwargs)
    # CUDA leaves the buffer of log_sigmoid's backward empty, to which one element is broadcast on the host
    if result is None or any(t.shape != value.shape for t, value in zip(tensors(out), tensors(result), strict=True)):
        card.answers.fill(card.values, op, args, made)
        return
    for t, value in zip(tensors(out), tensors(result), strict=True):
        card.values.set(t, value)


def _know_written(
    card: Card, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], fresh: bool
) -> None:
    """Write to the known contents of `written` as well, or forget them. fresh: what they held before is not read."""
    if not written or not written[0].is_cuda:
        return
    if fresh:
        card.answers.mark_finite_tests(card.values, op, args, written)
    if (fills := op._schema.name in _FILLS) or card.values.constants:
        large = len(written) == 1 and not all(keeps(t) for t in (written[0], *tensors(args)))
        number = _number(card, op, args, kwargs, written[0], fills) if large else None
        if number is not None:
            _hold(card, written[0], number)
            return
        put = _put(card, op, args) if large and op._schema.name in _PUTS and "reduce" not in kwargs else None
        for t in written:
            card.values.not_constant(t)
        if put is not None:
            card.values.set_pattern(written[0], put)
            return
    if not any(keeps(t) for t in written):
        return
    if all(keeps(t) for t in tensors(args)):
        if fresh:
            for t in written:
                if card.values.of(t) is None:
                    card.values.make_room(t)
        if card.values.run(op, args, kwargs) is not None:
            return
    for t in written:
        card.values.unknown(t)
    if fresh:
        card.answers.fill(card.values, op, args, [t for t in written if keeps(t)])


def _put(card: Card, op: Any, args: Args) -> Tensor | None:
    """Return where numbers are put into a tensor of zeros; None if that is unknown. Unknown numbers are not zero."""
    into, at = args[0], _PUTS[op._schema.name]
    if card.values.constant(into) != 0 or into.numel() > LARGEST:
        return None
    indices = args[at] if isinstance(args[at], list | tuple) else [args[at]]
    known: list[Any] = [card.values.of(i) if i is not None else slice(None) for i in indices]
    numbers = args[at + 1]
    value = card.values.of(numbers) if isinstance(numbers, Tensor) else torch.full((), numbers, device="cpu")
    if any(i is None for i in known) or (value is not None and not value.all()):
        return None
    put = zeros(into.shape, dtype=torch.bool, device="cpu")
    if at == 2:
        return put.scatter_(args[1], known[0], True)
    put[tuple(known)] = True
    return put


def _hold(card: Card, t: Tensor, number: Number) -> None:
    """Record that a result holds one number everywhere."""
    if keeps(t):
        card.values.set(t, torch.full((), number, dtype=t.dtype, device="cpu").expand(t.shape))
    else:
        card.values.set_constant(t, number)


def _number(card: Card, op: Any, args: Args, kwargs: Words, written: Tensor, fills: bool) -> Number | None:
    """Return the number that an operator writes everywhere into a large tensor; None for other contents."""
    if not fills:
        return of_constants(card.values, op, args, kwargs, written.numel())
    number = args[1] if len(args) > 1 else kwargs.get("value", 0)
    if isinstance(number, Tensor):
        held = card.values.of(number)
        return None if held is None else held.to(written.dtype).item()
    return torch.full((), number, dtype=written.dtype, device="cpu").item()


# operator that puts numbers into a tensor -> the place of its indices among the arguments; the numbers follow
_PUTS = {"aten::index_put_": 1, "aten::_index_put_impl_": 1, "aten::scatter": 2, "aten::scatter_": 2}
_FILLS = frozenset({"aten::zero_", "aten::fill_"})
_OVERWRITES = frozenset({
    "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
    "aten::exponential_",
})  # fmt: skip
_HANDLERS: dict[Any, Handler] = {}
