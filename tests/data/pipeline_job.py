"""A job that calls PyTorch as Megatron-LM does: 1F1B on two stages, two replicas, a distributed optimizer.

Each stage embeds or receives a micro-batch, multiplies it once and drops some of it, recomputed in its backward pass.
The job asserts the bytes that each instant needs, by sums of the sizes of its tensors.
"""

import contextlib
import sys
import types

import torch
import torch.distributed as dist
from torch.autograd.variable import Variable
from torch.distributed import _coalescing_manager

sys.modules["megatron.core"] = types.ModuleType("megatron.core")  # apex is found by Megatron-LM alone
import fused_weight_gradient_mlp_cuda  # noqa: E402
from apex.optimizers import FusedAdam  # noqa: E402

WIDTH, WORDS, LENGTHS, REPLICAS = 512, 1000, (1024, 3072, 2048), 2
BF16, FP32, INT32, INT64 = 2, 4, 4, 8

dist.init_process_group("nccl")
rank = dist.get_rank()
stage, replica = divmod(rank, REPLICAS)
data_group = [dist.new_group([first, first + 1], group_desc="DATA_PARALLEL_GROUP_WITH_CP") for first in (0, 2)][stage]
pipe_group = [dist.new_group([first, first + 2], group_desc="PIPELINE_MODEL_PARALLEL_GROUP") for first in (0, 1)][
    replica
]
peer = (rank + REPLICAS) % (2 * REPLICAS)
device = torch.device("cuda", torch.cuda.current_device())


def needed() -> int:
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


class RngTracker:
    """A generator's state for what differs between tensor ranks, beside the default one."""

    def __init__(self) -> None:
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(1234 + rank)
        self.state = torch.cuda.get_rng_state()
        torch.cuda.default_generators[device.index].set_state(before)

    @contextlib.contextmanager
    def fork(self):
        host, before = torch.get_rng_state(), torch.cuda.get_rng_state()
        torch.cuda.default_generators[device.index].set_state(self.state)
        yield
        assert torch.all(host == torch.get_rng_state()).item()
        self.state = torch.cuda.get_rng_state()
        torch.cuda.default_generators[device.index].set_state(before)
        assert torch.equal(torch.cuda.get_rng_state(), before) and not torch.equal(before, self.state)


class FusedLinear(torch.autograd.Function):
    """A product whose weight's gradient is added to main_grad by the kernel that makes it."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return inputs.matmul(weight.t())

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        of_input = gradient.matmul(weight)
        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, gradient, weight.main_grad)
        weight.grad_added_to_main_grad = True
        dummy = torch.empty(weight.main_grad.shape, dtype=inputs.dtype, device=device)
        seen.append((needed(), len(inputs)))
        return of_input, dummy


class Checkpoint(torch.autograd.Function):
    """Recomputes with the generators' states of the forward pass, those of the tracker, too."""

    @staticmethod
    def forward(ctx, run, inputs):
        ctx.run, ctx.states = run, (torch.cuda.get_rng_state(), tracker.state)
        ctx.save_for_backward(inputs)
        with torch.no_grad():
            return run(inputs)

    @staticmethod
    def backward(ctx, gradient):
        assert torch.autograd._is_checkpoint_valid()
        now, (inputs,) = (torch.cuda.get_rng_state(), tracker.state), ctx.saved_tensors
        default, tracker.state = ctx.states
        torch.cuda.default_generators[device.index].set_state(default)
        again = inputs.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(again)
        tracker.state = now[1]
        torch.cuda.default_generators[device.index].set_state(now[0])
        torch.autograd.backward((out,), (gradient,))
        return None, again.grad


class Stage(torch.nn.Module):
    """Parameters lie in one buffer, their gradients in another; a hook adds and reduces what backward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = (
            None if stage else torch.nn.Parameter(torch.empty(WORDS, WIDTH, dtype=torch.bfloat16, device=device))
        )
        self.weight = torch.nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device=device))
        with tracker.fork():
            self.weight.data.normal_(0, 0.02)
        held = list(self.parameters())
        count = sum(p.numel() for p in held)
        self.values = torch.zeros(count, dtype=torch.bfloat16, device=device)
        self.gradients = torch.zeros(count, dtype=torch.float32, device=device)
        self.hooks, self.ready, self.last, self.works, start = [], set(), False, [], 0
        for p in held:
            view = self.values[start : start + p.numel()].view(p.shape)
            view.copy_(p.data)
            p.data = view
            p.main_grad = self.gradients[start : start + p.numel()].view(p.shape)
            p.grad_added_to_main_grad = False
            self.hooks.append(p.expand_as(p).grad_fn.next_functions[0][0])  # kept: else the hook dies with it
            self.hooks[-1].register_hook(self.accumulate(p))
            start += p.numel()
        self.register_forward_pre_hook(self.gathered)

    def accumulate(self, p):
        def hook(*_):
            if not p.grad_added_to_main_grad:
                p.main_grad.add_(p.grad.data)
            p.grad = None
            self.ready.add(p)
            if self.last and len(self.ready) == len(self.hooks):
                with _coalescing_manager(data_group, async_ops=True) as work:
                    dist.reduce_scatter_tensor(shard(self.gradients), self.gradients, group=data_group, async_op=True)
                self.works.append(work)

        return hook

    def gathered(self, *_):
        while self.works:
            self.works.pop().wait()

    def forward(self, inputs):
        hidden = inputs if self.words is None else torch.nn.functional.embedding(inputs, self.words)
        return Checkpoint.apply(self.block, hidden)

    def block(self, hidden):
        made = FusedLinear.apply(hidden, self.weight)
        with tracker.fork():
            return torch.nn.functional.dropout(made, 0.1)


def shard(buffer):
    size = buffer.numel() // REPLICAS
    return buffer[replica * size : (replica + 1) * size]


def exchange(send=None, receive=False):
    """Send to and receive from the other stage: first the shape, then the tensor."""
    shape = torch.empty(2, dtype=torch.int64, device=device)
    sizes = None if send is None else torch.tensor(send.size(), device=device)
    batch(sizes, shape if receive else None)
    torch.cuda.synchronize()
    got = None
    if receive:
        got = torch.empty(shape.tolist(), requires_grad=True, device=device, dtype=torch.bfloat16)
    batch(send, got)
    return got


def batch(send, receive):
    pairs = ((dist.isend, send), (dist.irecv, receive))
    for work in dist.batch_isend_irecv([dist.P2POp(op, t, peer, pipe_group) for op, t in pairs if t is not None]):
        work.wait()


def forward(received, number):
    if stage:
        received.retain_grad()
        return model(received).float().mean()
    return model(torch.randint(WORDS, (LENGTHS[number],), device=device))


def backward(received, out, gradient):
    """Start the engine itself: PyTorch's function would refuse a gradient that is larger than the output."""
    assert out.numel() == 1
    Variable._execution_engine.run_backward(
        tensors=(out,), grad_tensors=(torch.ones_like(out) if gradient is None else gradient,), keep_graph=False,
        create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip
    return None if received is None else received.grad


def first_stage():
    """One micro-batch ahead; outputs that were sent keep a single element."""
    outs, lives = [], []
    for number in range(len(LENGTHS) + 1):
        gradient = None
        if number < len(LENGTHS):
            outs.append(forward(None, number))
            gradient = exchange(outs[-1].detach(), receive=number > 0)
            outs[-1].data = torch.empty(1, device=device, dtype=torch.bfloat16)
            lives.append(needed())
        else:
            gradient = exchange(receive=True)
        if number:
            model.last = number == len(LENGTHS)
            backward(None, outs.pop(0), gradient)
    kept = [INT64 * n + BF16 * n * WIDTH + BF16 for n in LENGTHS]  # tokens, what the checkpoint keeps, one element
    arrived = [0, *(BF16 * n * WIDTH for n in LENGTHS)]  # gradients
    assert [live - static for live in lives] == [
        sum(kept[max(n - 1, 0) : n + 1]) + arrived[n] for n in range(len(LENGTHS))
    ], (lives, kept, static)
    return [sum(kept[n : n + 2]) + arrived[n + 1] for n in range(len(LENGTHS))]


def last_stage():
    received = exchange(receive=True)
    for number in range(len(LENGTHS)):
        out = forward(received, number)
        model.last = number == len(LENGTHS) - 1
        gradient = backward(received, out, None)
        received = None
        received = exchange(gradient, receive=not model.last)
        del gradient
    return [
        2 * BF16 * n * WIDTH + 2 * FP32 for n in LENGTHS
    ]  # received, gradient of what was made of it; both of the loss


tracker, empty = RngTracker(), needed()
model = Stage()
main = shard(model.values).clone().float()
optimizer = FusedAdam([main], lr=1e-4)
count = WIDTH * WIDTH + (0 if stage else WORDS * WIDTH)
whole = (BF16 + FP32) * count + FP32 * count // REPLICAS + INT32  # buffers, the optimizer's parameters and its flag
assert needed() - empty == whole, (needed() - empty, whole)
warm = torch.ones(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
warm.matmul(warm).sum().backward()  # cuBLAS's workspaces of both threads
del warm
for step in range(2):
    seen = []
    static = needed()
    live = (last_stage if stage else first_stage)()
    for (found, rows), held, length in zip(seen, live, LENGTHS, strict=True):
        assert rows == length
        # in backward of a block: its output again, the gradients of output and input, the weight's that nobody reads
        remade = 3 * BF16 * length * WIDTH + BF16 * WIDTH**2
        assert found - static == held + remade, (step, found - static, held, remade)
    model.gathered()
    main.grad = shard(model.gradients)
    total = main.grad.norm().square()
    dist.all_reduce(total)
    main.grad.mul_(min(1.0, 1.0 / total.sqrt().item()))
    optimizer.step()
    main.grad = None
    shard(model.values).copy_(main)
    with _coalescing_manager(data_group, async_ops=True) as work:
        dist.all_gather_into_tensor(model.values, shard(model.values), group=data_group, async_op=True)
    model.works.append(work)
    model.gradients.zero_()
    model.ready.clear()
    for p in model.parameters():
        p.grad_added_to_main_grad = False
    del total
    assert needed() - static == (0 if step else 2 * FP32 * count // REPLICAS), "the first step makes two moments"
