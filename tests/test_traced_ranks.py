"""Several ranks of a script, traced together: values travel, ranks that differ are found, the worst one is judged."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from memfit import cli
from memfit.catalogue.cards import find_gpu
from memfit.documents.snapshot import read
from memfit.errors import BadInput
from memfit.nouns.tape import Alloc, Oom
from memfit.virtual.device.routing import uneven_share
from memfit.virtual.libraries.megatron_core import CHANGES
from memfit.virtual.libraries.transformer_engine.experts import fused_topk_with_score_function_fwd
from memfit.virtual.observer import Observer
from memfit.virtual.ranks.distinct import classes
from memfit.virtual.ranks.place import Place
from memfit.virtual.ranks.traced import WorldFacts, parse_ranks
from memfit.virtual.scripts.rank_processes import twins
from memfit.virtual.scripts.script import trace_script
from memfit.virtual.virtual_gpu import virtual_gpu

START = """import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)

def train(model, batch):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
VALUES = """
width = torch.zeros(1, dtype=torch.int64, device=device)
if rank == 0:
    width += 2048
dist.broadcast(width, 0)
chosen = [{"train": True} if rank == 0 else None]
dist.broadcast_object_list(chosen, src=0)
everyone = [None] * world
dist.all_gather_object(everyone, "x" * (rank + 1))
assert everyone == ["x" * (r + 1) for r in range(world)], everyone
dist.all_gather_object(everyone, {"held": torch.full((rank + 1,), rank)})
assert [one["held"].tolist() for one in everyone] == [[r] * (r + 1) for r in range(world)], everyone
share = [None]
dist.scatter_object_list(share, [10 * r for r in range(world)] if rank == 0 else None, src=0)
assert share == [10 * rank], share
large = [{"tensor": torch.tensor([7]), "bytes": bytes(5 << 20)} if rank == 0 else None]
dist.broadcast_object_list(large, src=0)
assert large[0]["tensor"].item() == 7 and len(large[0]["bytes"]) == 5 << 20
total = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(total)
most = torch.tensor([rank], device=device)
dist.all_reduce(most, dist.ReduceOp.MAX)
store = dist.distributed_c10d._get_default_store()
store.set(f"name-{rank}", f"rank {rank}")
assert store.get(f"name-{(rank + 1) % world}") == f"rank {(rank + 1) % world}".encode()
counts = torch.tensor([100 * (rank + 1), *[10] * (world - 1)], device=device)  # most tokens go to rank 0
received = torch.empty_like(counts)
dist.all_to_all_single(received, counts)
received, counts = received.tolist(), counts.tolist()
tokens = torch.empty(sum(received), width.item(), device=device)
dist.all_to_all_single(tokens, torch.randn(sum(counts), width.item(), device=device), received, counts)
assert tokens.device == device and (total.item(), most.item()) == (world * (world + 1) / 2, world - 1)
if chosen[0]["train"]:
    train(torch.nn.Linear(width.item(), 64).to(device), tokens)
"""
SAVED = """
import io
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8, 512, device=device)).sum().backward()
    optimizer.step()
if rank == 0:
    torch.save({"model": model.state_dict(), "step": torch.tensor(7), "config": {"width": 512}}, "best.pt")
else:
    torch.save("of rank 1", "other.pt")  # as the first file of this rank
dist.barrier()
loaded = torch.load("best.pt", map_location=device)
model.load_state_dict(loaded["model"])
assert (loaded["step"].item(), loaded["config"], torch.load("other.pt")) == (7, {"width": 512}, "of rank 1")
assert loaded["model"]["weight"].device == device
torch.empty(1 << 34, dtype=torch.uint8, device=device)  # 16 GiB
"""
UNEVEN = """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(1000, 1001), torch.nn.Linear(1001, 1000)).cuda()
for layer in model:
    fully_shard(layer)
train(fully_shard(model), torch.randn(8, 1000, device=device))
"""
PIPELINE = """
import sys
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4 if rank == 0 else 1)]).to(device)
stage = PipelineStage(layers, rank, world, device)
schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[sys.argv[1]](
    stage, n_microbatches=8, loss_fn=lambda out, target: (out - target).square().mean()
)
optimizer = torch.optim.AdamW(layers.parameters())
for _ in range(3):
    if rank == 0:
        schedule.step(torch.randn(8192, 512, device=device))
    else:
        schedule.step(target=torch.randn(8192, 512, device=device))
    optimizer.step()
    optimizer.zero_grad()
"""

CUT = """
shard = torch.nn.Parameter(torch.zeros([10, 30, 20][rank] << 20, device=device))
optimizer = torch.optim.SGD([shard], 0.1)
for _ in range(3):
    shard.square().sum().backward()
    dist.all_reduce(torch.zeros(1 << 20, device=device))
    optimizer.step()
    optimizer.zero_grad()
"""

EXPERTS = """
groups = [dist.new_group([first, first + 2], group_desc="EXPERT_MODEL_PARALLEL_GROUP") for first in (0, 1)]
group = groups[rank % 2]
class Router(torch.nn.Module):
    def forward(self, scores):
        taken = torch.topk(scores, 2, dim=-1).indices
        return torch.zeros_like(scores).int().scatter(1, taken, 1).bool()
router, expert = Router(), torch.nn.Linear(512, 64).to(device)
optimizer = torch.optim.SGD(expert.parameters())
for _ in range(3):
    sent = router(torch.randn(4096, 8, device=device)).sum(0).long()
    every = torch.empty(16, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(every, sent, group=group)
    mine = slice(4 * group.rank(), 4 * group.rank() + 4)
    received, sent = every.reshape(2, 8)[:, mine].sum(1).tolist(), sent.reshape(2, 4).sum(1).tolist()
    tokens = torch.empty(sum(received), 512, device=device)
    dist.all_to_all_single(tokens, torch.randn(sum(sent), 512, device=device), received, sent, group=group)
    expert(tokens).sum().backward()
    optimizer.step()
"""


def traced(folder: Path, body: str, capsys: pytest.CaptureFixture[str], *words: str, args: tuple[str, ...] = ()) -> Any:
    (folder / "train.py").write_text(START + body)
    code = cli.main(["trace", str(folder / "train.py"), "--steps", "2", "--json", *words, "--", *args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_values_travel_between_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = traced(tmp_path, VALUES, capsys, "--gpu", "3xh100", "--ranks", "all", "--save", str(tmp_path / "tapes"))
    assert found["steps"] == 2 and [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    tokens = {}
    for rank in range(3):
        tape = read(tmp_path / "tapes" / f"rank-{rank}.tape.gz", None)
        tokens[rank] = {e.size for e in tape.events if isinstance(e, Alloc)}
    row = 2048 * 4
    assert (100 + 200 + 300) * row in tokens[0] and (10 + 10 + 10) * row in tokens[1] & tokens[2]


@pytest.mark.parametrize(("share", "times"), [("balanced", (1.0, 1.0)), ("1.25", (1.25, 0.75))])
def test_the_experts_of_a_rank_get_the_share_of_tokens_that_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: str, times: tuple[float, float]
) -> None:
    words = ("--gpu", "4xh100", "--ranks", "0,2", "--answer", f"routing={share}", "--save", str(tmp_path / "tapes"))
    found = traced(tmp_path, EXPERTS, capsys, *words)
    assert any("routed" in note and (share == "balanced") == ("evenly" in note) for note in found["notes"])
    for rank, of_even in zip((0, 2), times, strict=True):
        tape = read(tmp_path / "tapes" / f"rank-{rank}.tape.gz", None)
        rows = {e.size // (512 * 4) for e in tape.events if isinstance(e, Alloc)}
        assert any(abs(n - 8192 * of_even) <= 4 for n in rows), sorted(rows)


def test_the_need_is_told_for_an_even_and_an_uneven_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = traced(tmp_path, EXPERTS, capsys, "--gpu", "4xh100", "--ranks", "0,2")
    share, even, uneven = (found["routing"][name] for name in ("share", "even", "uneven"))
    assert share == pytest.approx(uneven_share(4096, 2, 8, 4, 1))
    assert uneven - even > 8192 * (share - 1.01) * 512 * 4  # the tokens that a rank receives


@pytest.mark.parametrize(
    ("layers", "own", "groups"), [(1, 4, (1, 1)), (12, 4, (1, 1)), (1, 4, (4, 2)), (1, 16, (4, 2))]
)
def test_an_uneven_share_is_three_deviations_of_what_the_layers_keep(
    layers: int, own: int, groups: tuple[int, int]
) -> None:
    """Two tokens choose alike with a chance of 0.35 where 0.59 choose as one; a rank has `own` of 32 experts."""
    import torch

    draw, (count, taken) = torch.Generator().manual_seed(0), groups
    scores = torch.rand(4000, layers, count, 32 // count, generator=draw)
    chosen = torch.rand(4000, layers, count, generator=draw).topk(taken).indices
    scores = (scores + torch.zeros(4000, layers, count).scatter_(-1, chosen, 1.0)[..., None]).flatten(2)
    of_rank = (scores.topk(4).indices < own).sum(2)
    shares = 1 + 0.35**0.5 * (of_rank.double().mean(1) / (own * 4 / 32) - 1)
    share = uneven_share(1 << 20, 4, 32, own, layers, groups=groups)
    assert share - 1 == pytest.approx(3 * shares.std().item(), rel=0.05)


def test_a_router_that_chooses_groups_first_is_told_as_one_of_experts() -> None:
    import torch

    class Router(torch.nn.Module):
        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            groups = scores.view(-1, 4, 8).topk(2).values.sum(-1).topk(2).indices
            assert groups.shape == (4096, 2)
            return scores.topk(4).indices

    with virtual_gpu("h100") as card, Observer(card).watching():
        routing = card.answers.routing
        routing.share = math.nan
        for _ in range(2):
            taken = Router()(torch.randn(4096, 32, device="cuda"))
            assert (taken == 0).sum().item() == pytest.approx(512 * routing.given, abs=1)
        assert routing.given == uneven_share(4096, 4, 32, 1, 1, groups=(4, 2))
        assert len(routing.assumed) == 1


def test_a_router_that_balances_sends_a_rank_little_more_than_its_share() -> None:
    import torch

    draw, counts = torch.Generator().manual_seed(0), []
    for _ in range(20):  # tokens that are alike, as in a new transformer, balanced by Sinkhorn's iterations
        hidden = 0.4**0.5 * torch.randn(512, generator=draw) + 0.6**0.5 * torch.randn(4096, 512, generator=draw)
        scores = (hidden @ torch.randn(512, 8, generator=draw) * 0.02).exp()
        for _ in range(50):
            scores = scores / scores.sum(1, keepdim=True)
            scores = scores / scores.mean(0)
        counts.append(scores.argmax(1).bincount(minlength=8) / 512)
    share = uneven_share(4096, 1, 8, 1, 1, balanced=True)
    assert 1 < (share - 1) / (3 * torch.stack(counts).std().item()) < 2

    class TopKRouter(torch.nn.Module):
        def sinkhorn_load_balancing(self, logits: torch.Tensor) -> torch.Tensor:
            return torch.topk(logits, 1, dim=1).indices

        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            return self.sinkhorn_load_balancing(logits)

    module, taken = ModuleType("megatron.core.transformer.moe.router"), []
    vars(module)["TopKRouter"] = TopKRouter
    with virtual_gpu("h100") as card, Observer(card).watching(), CHANGES[module.__name__](module):
        card.answers.routing.share = math.nan
        for training in (True, False):  # Megatron-LM does not balance in evaluations
            taken.append((TopKRouter().train(training)(torch.randn(4096, 8, device="cuda")) == 0).sum().item())
    assert taken == [pytest.approx(512 * one, abs=1) for one in (share, uneven_share(4096, 1, 8, 1, 1))]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position", "fused"])
def test_a_capacity_bounds_what_an_expert_takes(policy: str, padded: bool) -> None:
    """The card drops the tokens that PyTorch drops on the CPU: those of each expert beyond its capacity."""
    import torch

    class Router(torch.nn.Module):
        def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the tokens of each expert before and after Megatron-LM's dropping."""
            scores, taken = logits.topk(2, dim=1)
            probs = torch.zeros_like(logits).scatter(1, taken, scores.softmax(-1))
            chosen = torch.zeros_like(logits).int().scatter(1, taken, 1).bool()
            if policy == "fused" and logits.is_cuda:
                probs, chosen, _ = fused_topk_with_score_function_fwd(logits, 2, False, *3 * [None], "softmax", None)
            ranked = chosen.int() if policy == "position" else probs
            kept = torch.zeros_like(probs).scatter(0, ranked.topk(1100, dim=0, sorted=False).indices, 1).bool()
            return chosen.sum(0), (kept if padded else chosen & kept).sum(0)

    favoured = torch.randn(4096, 8) + torch.tensor([1.0] + 7 * [0.0])
    with virtual_gpu("h100") as card, Observer(card).watching():
        card.answers.routing.share = 1.5
        found = {name: Router()(favoured.to(name)) for name in ("cpu", "cuda")}
        for before, after in found.values():
            before, after = before.cpu(), after.cpu()
            assert before[0] > 1100 and before.sum() == 8192
            assert after.equal(torch.full_like(before, 1100) if padded else before.clamp(max=1100))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["kept", "called", "reentrant", "again", "evaluated"])
def test_layers_share_what_they_keep_and_not_what_is_made_again(how: str) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    class Router(torch.nn.Linear):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen.append(card.answers.routing.layers())
            return super().forward(tokens).relu()

    seen: list[int] = []
    with virtual_gpu("h100") as card, Observer(card).watching(), torch.set_grad_enabled(how != "evaluated"):
        blocks = torch.nn.Sequential(*(torch.nn.Sequential(Router(64, 64), torch.nn.ReLU()) for _ in range(4))).cuda()
        if how in ("reentrant", "again"):
            for block in blocks:
                whole = block.forward
                block.forward = functools.partial(checkpoint, whole, use_reentrant=how == "reentrant")
        out = torch.randn(8, 64, device="cuda", requires_grad=how != "evaluated")
        for block in blocks if how == "called" else (blocks,):  # one by one, as overlapping schedules do
            out = block(out)
        if how != "evaluated":
            out.sum().backward()
    assert seen == {"kept": [4] * 4, "called": [1, 2, 3, 4], "evaluated": [1] * 4}.get(how, [1] * 8)


SPAWNED = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, world):
    dist.init_process_group("nccl", "tcp://localhost:1234", world_size=world, rank=rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3): model(torch.zeros(8, 512, device=rank)).sum().backward(); optimizer.step()
mp.spawn(work, (2,), nprocs=2)
"""


def test_nccl_counts_where_the_script_starts_its_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    assert cli.main(["trace", str(tmp_path / "train.py"), "--gpu", "l4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] == find_gpu("l4").usable_bytes()
    assert any("0.75 GiB are counted" in note for note in found["notes"])


# NCCL takes its memory with the first collective: what was freed by then could have had it
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kept", "ending"), [("del made; torch.cuda.empty_cache()", "enough"), ("del made", "oom")])
def test_nccl_takes_its_memory_with_the_first_collective(tmp_path: Path, kept: str, ending: str) -> None:
    body = f"made = torch.empty(900 << 20, dtype=torch.uint8, device=device)\n{kept}\ndist.barrier()\n"
    steps = "train(torch.nn.Linear(64, 64).to(device), torch.ones(8, 64, device=device))\n"
    (tmp_path / "train.py").write_text(START + body + steps)
    sizes = {"capacity": 1 << 30, "nccl": 512 << 20}
    tape, outcome = trace_script(tmp_path / "train.py", [], find_gpu("l4"), steps=2, place=Place(0, 2), **sizes)
    assert outcome.ending == ending
    assert ending == "enough" or any(isinstance(e, Oom) and e.size == sizes["nccl"] for e in tape.events)


def test_any_rank_loads_what_another_has_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = traced(tmp_path, SAVED, capsys, "--gpu", "2xh100", "--ranks", "all")
    assert [rank["levels"]["allocated"] >> 34 for rank in found["ranks"]] == [1, 1], found["notes"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_ranks_with_uneven_shards_are_traced_and_twins_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = traced(tmp_path, UNEVEN, capsys, "--gpu", "4xh100")
    assert [(rank["rank"], rank["members"]) for rank in found["ranks"]] == [(0, [0, 1, 2]), (3, [3])]
    larger, smaller = (rank["levels"]["allocated"] for rank in found["ranks"])
    assert larger > smaller  # 1001 rows are 251 on each rank but the last, which has 248
    assert "ranks 0 and 2 were both traced: equal to the byte" in found["notes"]
    assert found["ranks"][0]["communicators"][0][1] == 4


def test_all_ranks_are_traced_where_two_differ_that_should_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = traced(tmp_path, CUT, capsys, "--gpu", "3xh100")
    assert sorted((rank["rank"], rank["members"]) for rank in found["ranks"]) == [(i, [i]) for i in range(3)]
    assert found["ranks"][0]["rank"] == 1, "the rank with the largest shard, neither first nor last"


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.nightly)])
def test_stages_of_a_pipeline_are_traced_together(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = traced(tmp_path, PIPELINE, capsys, "--gpu", "2xh100", args=(schedule,))
    first, last = sorted(found["ranks"], key=lambda rank: rank["rank"])
    assert (first["position"], last["position"]) == ("stage 0", "stage 1")
    assert found["ranks"][0] == max(found["ranks"], key=lambda rank: rank["levels"]["reserved"])
    target = 8192 * 512 * 4  # there before the first forward, like the weights
    assert first["roles"]["parameters"] == 4 * (last["roles"]["parameters"] - target)


@pytest.mark.filterwarnings("ignore")
def test_a_job_that_calls_pytorch_as_megatron_does(capsys: pytest.CaptureFixture[str]) -> None:
    """The job itself asserts what its tensors need at each instant."""
    job = Path(__file__).parent / "data" / "pipeline_job.py"
    code = cli.main(["trace", str(job), "--gpu", "4xh100", "--ranks", "0,2", "--steps", "2", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    first, last = sorted(json.loads(out)["ranks"], key=lambda rank: rank["rank"])
    for rank, count in ((first, (512 + 1000) * 512), (last, 512 * 512)):
        # bf16 values, this replica's half of the fp32 ones, and fp32 gradients
        assert (rank["roles"]["parameters"], rank["roles"]["gradients"]) == ((2 + 4 / 2) * count, 4 * count)


@pytest.mark.nightly
def test_a_failing_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(START + "if rank == 1:\n    raise ValueError('no data for me')\ndist.barrier()")
    assert cli.main(["trace", str(tmp_path / "train.py"), "--gpu", "2xh100"]) == 2
    assert "rank 1: train.py:14: ValueError: no data for me" in " ".join(capsys.readouterr().err.split())


def _mesh(*sizes: int) -> WorldFacts:
    """The groups of a mesh whose dimensions are named pp, dp, tp, as init_device_mesh makes them."""
    stages, copies, shards = sizes
    ranks = [[[(p * copies + d) * shards + t for t in range(shards)] for d in range(copies)] for p in range(stages)]
    along = {
        "mesh_pp": [tuple(ranks[p][d][t] for p in range(stages)) for d in range(copies) for t in range(shards)],
        "mesh_dp": [tuple(ranks[p][d][t] for d in range(copies)) for p in range(stages) for t in range(shards)],
        "mesh_tp": [tuple(ranks[p][d]) for p in range(stages) for d in range(copies)],
    }
    return WorldFacts(tuple((name, group) for name, groups in along.items() for group in groups))


def test_distinct_ranks_follow_from_the_groups() -> None:
    found = classes(_mesh(16, 8, 8), 1024)
    assert len(found) == 2 * 16 and sum(len(c.members) for c in found) == 1024
    assert found[0].members == tuple(range(0, 64, 8)) and found[0].what == "stage 0, first tensor rank"
    model = WorldFacts(groups=tuple((n, (0, 1, 2)) for n in ("MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP")))
    assert [c.what for c in classes(model, 3)] == ["stage 0", "stage 1", "stage 2"]
    everyone = WorldFacts(messages=frozenset({(0, 1), (1, 2)}))
    assert [c.rank for c in classes(everyone, 3)] == [0, 1, 2]
    assert len(classes(WorldFacts(), 8)) == 1
    shards = WorldFacts(shards={(0, 1, 2, 3): (0, 0, 0, 1)})
    assert [c.members for c in classes(shards, 4)] == [(0, 1, 2), (3,)]


def test_twins_are_ranks_that_wait_for_no_other() -> None:
    found = classes(WorldFacts((("pp", (0, 2)), ("pp", (1, 3)), ("dp", (0, 1)), ("dp", (2, 3)))), 4)
    talking = WorldFacts(messages=frozenset({(0, 2)}))
    assert twins(found, [WorldFacts()]) and not {*twins(found, [talking])} & {0, 2}


def test_a_rank_knows_its_machine() -> None:
    place = Place(13, 20, 8)
    told = place.variables()
    assert (told["LOCAL_RANK"], told["GROUP_RANK"], told["LOCAL_WORLD_SIZE"], place.nodes) == ("5", "1", "8", 3)
    assert Place(19, 20, 8).local_size == 4
    with pytest.raises(BadInput):
        Place(20, 20)


@pytest.mark.parametrize(
    ("text", "ranks"), [("distinct", ()), ("all", (0, 1, 2, 3)), ("last", (3,)), ("0,2-3", (0, 2, 3)), ("1", (1,))]
)
def test_ranks_are_read(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize("text", ["4", "-1", "first", "", "2-1"])
def test_ranks_that_are_not_there_are_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_ranks(text, 4)
