"""Several ranks on the virtual card: streams, resized storages, FSDP2 and DDP as recorded, accelerate's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
import transformers  # noqa: E402
from torch.distributed import checkpoint  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from transformers.initialization import no_init_weights  # noqa: E402

import oracle_sharded  # noqa: E402
from memfit.allocator.replay import replay  # noqa: E402
from memfit.frameworks.process_layout import BLOCKS  # noqa: E402
from memfit.nouns.tape import ROLES, Alloc, RecordStream  # noqa: E402
from memfit.virtual.jobs import run  # noqa: E402
from memfit.virtual.jobs.recipe import Setup  # noqa: E402
from memfit.virtual.observer import Observer  # noqa: E402
from memfit.virtual.ranks.peers import Peers  # noqa: E402
from memfit.virtual.ranks.place import Place  # noqa: E402
from memfit.virtual.virtual_gpu import virtual_gpu  # noqa: E402

DATA = json.loads((Path(__file__).parent / "data" / "sharded_runs.json").read_text())
MIB = 1 << 20
TINY = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_resized_storage_frees_its_memory_and_takes_new() -> None:
    with virtual_gpu("rtx-4090"):
        t = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        storage, view = t.untyped_storage(), t[MIB:]
        storage.resize_(0)
        assert torch.cuda.memory_allocated() == storage.size() == 0
        other = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        storage.resize_(8 * MIB)
        assert torch.cuda.memory_allocated() == 16 * MIB
        assert view.data_ptr() == t.data_ptr() + MIB != other.data_ptr() + MIB
        storage.resize_(2 * MIB)
        del t, view, storage, other
        assert torch.cuda.memory_allocated() == 0


@pytest.mark.filterwarnings("ignore")
def test_sharded_weights_are_initialised_at_random() -> None:
    """DTensor counts random numbers in the state of the card's generator: a seed and an offset, as CUDA's has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with virtual_gpu("rtx-4090", world_size=2):
        dist.init_process_group("nccl")
        try:
            weight = distribute_tensor(
                torch.empty(64, 64, device="cuda"), init_device_mesh("cuda", (2,)), [Shard(0)], src_data_rank=None
            )
            before = torch.cuda.get_rng_state()
            torch.nn.init.normal_(weight)
            assert weight.to_local().shape == (32, 64)
            after = torch.cuda.get_rng_state()
            assert before.shape == after.shape == (16,) and not torch.equal(before, after)
            torch.cuda.set_rng_state(before)
            assert torch.equal(torch.cuda.get_rng_state(), before)
        finally:
            dist.destroy_process_group()


def test_each_stream_has_its_own_free_blocks() -> None:
    with virtual_gpu("rtx-4090") as card:
        side = torch.cuda.Stream()
        a = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        del a
        one = torch.cuda.memory_reserved()
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            b = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 2 * one
        b.record_stream(torch.cuda.current_stream())
        del b
        with torch.cuda.stream(side):
            torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 2 * one
        tape = Observer(card).tape({})
        assert RecordStream(1, 0) in tape.events
        assert replay(tape.events).peak.reserved == 2 * one


@pytest.mark.filterwarnings("ignore:.*barrier")
def test_collectives_allocate_nothing_beside_their_outputs_and_keep_small_values() -> None:
    with virtual_gpu("h100", world_size=64) as card:
        dist.init_process_group("nccl")  # as a script does that torchrun started
        assert dist.get_world_size() == 64
        assert dist.get_rank() == 0
        ids = torch.tensor([3, 5], device="cuda")
        everyone = torch.empty(128, dtype=torch.int64, device="cuda")
        big, part = torch.empty(64 * MIB, device="cuda"), torch.empty(MIB, device="cuda")
        before, before_barrier = len(card.ledger.blocks), card.settled().allocated
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(everyone, ids)  # its name up to 2.12
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, big)
        dist.all_reduce(part)
        assert len(card.ledger.blocks) == before
        dist.barrier()  # sends one number, and another chooses its backend
        assert len(card.ledger.blocks) == before + 2
        assert card.settled().allocated == before_barrier
        assert everyone.tolist() == [3, 5] * 64
        gathered = [torch.empty(2, dtype=torch.int64, device="cuda") for _ in range(64)]
        dist.all_gather(gathered, ids)
        assert gathered[63].tolist() == [3, 5]
        assert card.ledger.ops[card.ledger.ops.index(64 * 16)] == 64 * 16  # NCCL gathers into one flat tensor first
        group = dist.new_group(list(range(8)), backend="gloo")
        assert dist.get_world_size(group) == 8
    assert not dist.is_initialized()


def test_a_mesh_spreads_experts_over_all_ranks_and_their_tokens_are_counted() -> None:
    """torchtitan's and transformers' meshes have a dimension "ep", and torchtitan counts by histc."""

    class Router(torch.nn.Module):
        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            return scores.topk(2).indices

    with virtual_gpu("h100", world_size=4) as card, Observer(card).watching():
        mesh = init_device_mesh("cuda", (1, 4), mesh_dim_names=("efsdp", "ep"))
        card.answers.routing.share = 1.25
        taken = Router()(torch.randn(4096, 8, device="cuda"))
        counts = torch.histc(taken.flatten(), bins=8, min=0, max=8)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=mesh.get_group("ep"))
        of_ranks = counts.view(4, 2).sum(1).tolist()
        assert of_ranks == pytest.approx([2048 * share for share in (1.25, *3 * [2.75 / 3])], abs=2)
        assert received.sum().item() == 4 * of_ranks[0] and counts.dtype == torch.int64


@pytest.mark.parametrize(("card", "kernel"), [("h100", "Cudnn"), ("a100-80gb", "Flash"), ("l4", "Flash")])
def test_heads_of_a_tensor_parallel_group_take_the_kernel_of_the_card(card: str, kernel: str) -> None:
    """DTensor has rules for the fused kernels. The math kernel adds a plain mask, which they refuse."""
    with virtual_gpu(card, world_size=4):
        mesh = init_device_mesh("cuda", (4,))
        heads = torch.empty(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        q = DTensor.from_local(heads, mesh, [Shard(1)])
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert kernel in out.grad_fn.name()
        assert out.shape == (2, 8, 256, 64) and out.to_local().shape == heads.shape
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            assert "Cudnn" in F.scaled_dot_product_attention(q, q, q, is_causal=True).grad_fn.name()
        with pytest.raises(RuntimeError, match="mixed torch"), sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.filterwarnings("ignore")
def test_the_traced_ranks_save_and_load_their_parts_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    with virtual_gpu("h100", world_size=4):
        model = fully_shard(torch.nn.Linear(64, 64, device="cuda"), mesh=init_device_mesh("cuda", (4,)))
        checkpoint.save(state := model.state_dict(), checkpoint_id=tmp_path)
        checkpoint.load(state, checkpoint_id=tmp_path)
    shapes = checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert shapes["weight"].size == (64, 64) and [chunk.sizes for chunk in shapes["weight"].chunks] == [(16, 64)]


@pytest.mark.parametrize("way", ["never", "wait", "functional"])
def test_the_watchdog_holds_what_nobody_waits_for(way: str) -> None:
    def reduced(grad: Any) -> Any:
        buffer = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
        if way == "functional":
            return grad + 0 * funcol.all_reduce(buffer, "sum", dist.group.WORLD)[0]
        work = dist.all_reduce(buffer, async_op=True)
        if way == "wait":
            work.wait()
        return grad

    with virtual_gpu("h100", world_size=4) as card:
        x = torch.ones(8, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(reduced)
        y.sum().backward()
        assert (card.settled().allocated > 16 * MIB) == (way == "never")


@pytest.mark.filterwarnings("ignore:.*barrier")
def test_what_was_in_the_outputs_of_unknown_values_is_forgotten() -> None:
    with virtual_gpu("h100", world_size=2) as card:
        unknown = torch.empty(8, device="cuda")
        gathered, exchanged = ([torch.zeros(8, device="cuda") for _ in range(2)] for _ in range(2))
        dist.all_gather(gathered, unknown)
        dist.all_to_all(exchanged, [unknown, torch.randn(4, device="cuda")])
        assert [card.values.of(t) for t in (*gathered, *exchanged)] == [None] * 4


def test_only_groups_that_send_from_the_card_have_buffers_of_nccl() -> None:
    peers = Peers()
    with virtual_gpu("h100", place=Place(0, 2), peers=peers):
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"))
        assert peers.facts.own == ()
        dist.all_reduce(torch.ones(2, device="cuda"))
        assert [(group.size, group.calls) for group in peers.facts.own] == [(2, {"all_reduce": 1})]


@pytest.mark.filterwarnings("ignore")
def test_a_gather_into_the_tensor_that_holds_its_own_part() -> None:
    with virtual_gpu("h100", world_size=4):
        everyone = torch.tensor([7, 8, 0, 0, 0, 0, 0, 0], device="cuda")
        dist.all_gather_into_tensor(everyone, everyone[:2])
        assert everyone.tolist() == [7, 8] * 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "recorded",
    [r for r in DATA["runs"] if r["case"]["model"] == "qwen3-0.6b" and r["case"]["accum"] == 1],
    ids=lambda r: r["id"],
)
def test_the_traced_run_is_the_recorded_one(recorded: dict[str, Any]) -> None:
    """A DDP run equals one of two: the watchdog let go of the first step's buckets before the second, or did not."""
    case, real = recorded["case"], oracle_sharded.distilled(recorded)
    traces = [
        oracle_sharded.traced(case, DATA["configs"][case["model"]], late=late)
        for late in oracle_sharded.watchdogs(case)
    ]
    assert [] in [oracle_sharded.compare_distilled(real, ours) for ours in traces]
    assert any(ours["s2.m1.backward"][0] == recorded["backward"] for ours in traces)


def _peak(world_size: int, **words: Any) -> int:
    with virtual_gpu("h100", world_size=world_size) as card:
        observer = Observer(card)
        with observer.watching():
            run(
                Setup(config=TINY, sequence=64, dtype="fp32", autocast="bf16", world_size=world_size, **words), observer
            )
        assert card.settled().allocated < 1 << 30
        return card.settled().requested_peak


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_accelerate_shards_and_replicates(trainer: Any) -> None:
    alone, sharded = _peak(1, trainer=trainer), _peak(8, trainer=trainer, shard="parameters")
    assert sharded < alone < _peak(8, trainer=trainer)


@pytest.mark.filterwarnings("ignore")
def test_shards_and_the_buffers_of_their_communication_are_named() -> None:
    with virtual_gpu("h100", world_size=8, capacity=None) as card:
        observer = Observer(card)
        words: dict[str, Any] = {"trainer": "transformers", "shard": "parameters", "autocast": "bf16"}
        with observer.watching():
            run(Setup(config=TINY, sequence=64, dtype="fp32", world_size=8, steps=2, **words), observer)
        born = [e for e in observer.tape({}).events if isinstance(e, Alloc)]
    of = {role: sum(e.size for e in born if e.role == role) for role in ROLES}
    weights = 4 * (2 * 1000 * 256 + 256 + 2 * (2 * 256 + 3 * 256 * 512 + 2 * 256 * 256 + 2 * 128 * 256)) // 8
    assert weights <= of["parameters"] < weights + 4096  # with the model's buffers
    assert of["gradients"] == 2 * weights
    assert of["optimizer_states"] == pytest.approx(2 * weights, abs=64 * 4)
    labels = {(e.role, e.label.rpartition(": ")[2]) for e in born}
    for buffer in ("all-gather buffer", "reduce-scatter buffer", "gathered parameters"):
        assert ("temporaries", buffer) in labels
    assert {"gradient of model.layers.0", "gradients of several modules"} <= {label for _, label in labels}


@pytest.mark.filterwarnings("ignore")
def test_offloaded_shards_leave_the_card() -> None:
    words: dict[str, Any] = {"trainer": "torch", "load": "meta", "shard": "parameters", "use_cache": False}
    assert _peak(2, offload=True, clip=0.0, **words) < _peak(2, clip=0.0, **words)


def sharded_peak(offloaded: bool) -> tuple[set[str], int]:
    """Where FSDP2 keeps the weights of a small model between steps, and the highest allocated bytes of two steps."""
    with virtual_gpu("a100-80gb", world_size=8):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        words = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        if offloaded:
            words["offload_policy"] = CPUOffloadPolicy()
        layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
        model = torch.nn.Sequential(*(fully_shard(layer, **words) for layer in layers))
        fully_shard(model, **words)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {p.device.type for p in model.parameters()}, torch.cuda.max_memory_allocated()


def test_fsdp2_offloads_to_the_host() -> None:
    (here, whole), (there, offloaded) = sharded_peak(False), sharded_peak(True)
    assert (here, there) == ({"cuda"}, {"cpu"})
    shards = 8 * (1024 * 1024 + 1024) * 4 // 8
    assert whole - offloaded >= 3 * shards  # the weights and both moments


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_blocks_told_by_name_are_those_of_the_model(kind: str) -> None:
    """Where `_no_split_modules` names a class that the model has none of, accelerate's FSDP2 gives up."""
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = transformers.AutoConfig.for_model(kind)
    config.get_text_config().update(layers)
    with torch.device("meta"), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    present = {type(module).__name__ for module in model.modules()}
    assert BLOCKS[kind] in present and set(model._no_split_modules) - present
