"""Scripts of several ranks in the ways that public ones are written, each with bytes that follow from its sizes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit import cli  # noqa: E402
from memfit.allocator.replay import replay  # noqa: E402
from memfit.nouns.tape import Alloc, Free, Mark, Tape  # noqa: E402
from memfit.virtual.ranks.traced import ScriptOutcome  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH, TOKENS, LAYERS = 512, 4096, 4
START = f"""
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
H = {WIDTH}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))
blocks = [Block() for _ in range({LAYERS})]
batch = lambda: torch.randn({TOKENS}, H, device=rank)
"""
LOOP = """
for step in range(9):
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLAIN = (
    "model = DDP(nn.Sequential(*blocks).cuda(), device_ids=[rank])\noptimizer = torch.optim.AdamW(model.parameters())\n"
)
WEIGHTS = 4 * LAYERS * (8 * WIDTH * WIDTH + 5 * WIDTH)
HIDDEN = 4 * TOKENS * 4 * WIDTH  # bytes of the wide layer's output


def traced(folder: Path, text: str, world: int = 2) -> tuple[Tape, ScriptOutcome]:
    (folder / "train.py").write_text(START + text)
    return trace_script(folder / "train.py", [], "h100", steps=2, world_size=world)


def peak(tape: Tape) -> int:
    return replay(tape.events).by_phase()["step"].requested


def held(tape: Tape, instant: str) -> Counter[str]:
    """Return the bytes of each role when an instant begins for the last time."""
    live: dict[int, Alloc] = {}
    found: Counter[str] = Counter()
    for event in tape.events:
        if isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            live.pop(event.id)
        elif isinstance(event, Mark) and event.instant == instant:
            found = Counter()
            for block in live.values():
                found[block.role] += block.size
    return found


def test_zero_redundancy_keeps_a_share_of_the_states(tmp_path: Path) -> None:
    """The optimizer steps one of its own over its share: together they are one step."""
    wrapped = PLAIN.replace("torch.optim.AdamW(", "ZeroRedundancyOptimizer(optimizer_class=torch.optim.AdamW, params=")
    loop = LOOP.replace("    loss =", "    with model.no_sync():\n        model(batch()).sum().backward()\n    loss =")
    text = "from torch.distributed.optim import ZeroRedundancyOptimizer\n" + wrapped + loop
    tape, outcome = traced(tmp_path, text, world=4)
    assert outcome.steps == 2
    assert held(tape, "after the step")["optimizer_states"] == pytest.approx(2 * WEIGHTS / 4, rel=0.01)


def test_fsdp1_with_cpu_offload_leaves_no_states_on_the_card(tmp_path: Path) -> None:
    text = (
        """
import functools
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
model = FSDP(nn.Sequential(*blocks), cpu_offload=CPUOffload(True), device_id=rank, auto_wrap_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
"""
        + LOOP
    )
    tape, outcome = traced(tmp_path, text)
    now = held(tape, "after the step")
    assert outcome.steps == 2 and now["optimizer_states"] == 0
    assert now["parameters"] + now["gradients"] < WEIGHTS / 2


def test_saved_tensors_move_to_the_host(tmp_path: Path) -> None:
    kept, _ = traced(tmp_path, PLAIN + LOOP)
    hooked = LOOP.replace("    loss =", "    with torch.autograd.graph.save_on_cpu(pin_memory=True):\n        loss =")
    moved, outcome = traced(tmp_path, PLAIN + hooked)
    assert outcome.steps == 2
    # all but the last block's wide output, which is fetched at the beginning of the backward pass
    assert peak(kept) - peak(moved) >= (LAYERS - 1) * HIDDEN


def test_a_checkpoint_policy_saves_what_it_names(tmp_path: Path) -> None:
    def text(policy: str) -> str:
        return (
            f"""
from functools import partial
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if {policy} else CheckpointPolicy.PREFER_RECOMPUTE
contexts = partial(create_selective_checkpoint_contexts, policy)
class Net(nn.ModuleList):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x
blocks = [Net(blocks)]
"""
            + PLAIN
            + LOOP
        )

    tapes = [traced(tmp_path, text(policy))[0] for policy in ("op == torch.ops.aten.addmm.default", "False")]
    saved, full = (held(tape, "backward")["activations"] for tape in tapes)
    assert saved - full == LAYERS * (HIDDEN + HIDDEN // 4)


def test_a_script_that_sends_between_stages_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes travel ahead of the tensors; every rank is a stage, and each was traced: no message is made up."""
    text = """
layers = nn.Sequential(*(blocks if rank == 0 else blocks[:2])).cuda()
optimizer = torch.optim.AdamW(layers.parameters())
def run(kind, t, other):
    for work in dist.batch_isend_irecv([dist.P2POp(kind, t, other)]):
        work.wait()
    return t
def send(t, to):
    run(dist.isend, torch.tensor(t.shape, device=rank), to)
    run(dist.isend, t, to)
def receive(source):
    shape = run(dist.irecv, torch.empty(2, dtype=torch.int64, device=rank), source)
    return run(dist.irecv, torch.empty(shape.tolist(), device=rank), source)
for step in range(9):
    kept = []
    for micro in range(4):
        x = batch() if rank == 0 else receive(rank - 1).requires_grad_()
        kept.append((x, layers(x)))
        if rank < world - 1:
            send(kept[-1][1].detach(), rank + 1)
    for x, y in kept:
        if rank == world - 1:
            y.square().mean().backward()
        else:
            torch.autograd.backward(y, receive(rank + 1))
        if rank:
            send(x.grad, rank - 1)
    kept.clear()
    optimizer.step()
    optimizer.zero_grad()
"""
    (tmp_path / "train.py").write_text(START + text)
    assert cli.main(["trace", str(tmp_path / "train.py"), "--gpu", "3xh100", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["position"] for r in sorted(found["ranks"], key=lambda r: r["rank"])] == ["stage 0", "stage 1", "stage 2"]
    assert found["ranks"][0]["rank"] == 0 and found["ranks"][0]["roles"]["optimizer_states"] == pytest.approx(
        2 * WEIGHTS
    )
    assert found["ranks"][0]["roles"]["activations"] >= 4 * LAYERS * HIDDEN
    assert not any("not traced" in note for note in found["notes"])
