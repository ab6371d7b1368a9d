"""The allocator against recordings of PyTorch's own, against its rules one by one, and against its invariants."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import allocator_programs
from memfit.allocator import Allocator, OutOfMemory
from memfit.allocator.blocks import PENDING, allocation_size, round_size
from memfit.errors import Unsupported
from memfit.nouns.alloc_settings import AllocSettings, parse_alloc_conf
from memfit.units import GIB, KIB, MIB

DATA = Path(__file__).parent / "data"
PROGRAMS = sorted((DATA / "allocator_programs").glob("*.json.gz"))
TAPES = sorted((DATA / "tapes").glob("*.tape.json.gz"))
PLAIN = AllocSettings()
EXPANDABLE = AllocSettings(expandable_segments=True)


def _read(path: Path) -> Any:
    with gzip.open(path, "rt") as stream:
        return json.load(stream)


def _record(tape: Path) -> Any:
    return json.loads(tape.with_name(tape.name.replace(".tape.json.gz", ".json")).read_text())


# --- recordings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_every_statistic_after_every_operation_is_pytorchs(path: Path) -> None:
    program = _read(path)
    assert len(program["ops"]) > 500
    assert allocator_programs.check_program(program) is None


@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.name)
def test_training_runs_take_the_recorded_segments_and_peaks(path: Path) -> None:
    assert allocator_programs.check_tape(_read(path), _record(path)) is None


@pytest.mark.parametrize("column", range(8))
def test_the_checker_names_a_statistic_that_differs(column: int) -> None:
    program = _read(PROGRAMS[0])
    program["stats_after_each_op"][400][column] += 1
    difference = allocator_programs.check_program(program)
    assert difference.startswith("operation 400 ") and program["stat_keys"][column] in difference


def test_the_checker_names_an_operation_that_ended_otherwise() -> None:
    program = _read(DATA / "allocator_programs" / "plain-3-small-card.json.gz")
    number = next(i for i, operation in enumerate(program["ops"]) if operation[0] == "oom")
    program["ops"][number][0] = "alloc"
    assert "recorded alloc, here oom" in allocator_programs.check_program(program)


@pytest.mark.parametrize("level", ["requested", "allocated", "reserved"])
def test_the_checker_names_a_peak_that_differs(level: str) -> None:
    record = _record(TAPES[0])
    record["peak"][level] += 512
    assert level in allocator_programs.check_tape(_read(TAPES[0]), record)


def test_the_checker_finds_a_segment_that_differs() -> None:
    tape = copy.deepcopy(_read(TAPES[0]))
    tape["size"][tape["op"].index("S")] += 2 * MIB
    assert allocator_programs.check_tape(tape, _record(TAPES[0])).startswith("segment call 0")


def test_the_checker_exits_with_one_at_a_difference_and_two_at_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert allocator_programs.main([str(tmp_path)]) == 2
    program = _read(PROGRAMS[0])
    with gzip.open(tmp_path / "good.json.gz", "wt") as stream:
        json.dump(program, stream)
    assert allocator_programs.main([str(tmp_path)]) == 0
    program["stats_after_each_op"][7][0] += 1
    with gzip.open(tmp_path / "wrong.json.gz", "wt") as stream:
        json.dump(program, stream)
    capsys.readouterr()
    assert allocator_programs.main([str(tmp_path)]) == 1
    assert "wrong.json.gz: operation 7 " in capsys.readouterr().err


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "divisions", "block"),
    [
        (1, 0, 512), (512, 0, 512), (513, 0, 1024), (MIB + 1, 0, MIB + 512),
        (1200, 4, 1536), (2049, 4, 2560), (3 * MIB + 1, 4, 3 * MIB + 512 * KIB), (4 * MIB, 4, 4 * MIB),
        (5 * MIB, 1, 5 * MIB), (5 * MIB + 1, 2, 6 * MIB), (7 * MIB, 8, 7 * MIB),
    ],
)  # fmt: skip
def test_sizes_are_rounded_like_round_size(size: int, divisions: int, block: int) -> None:
    assert round_size(size, (divisions,) * 16) == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
     (10 * MIB + 512, 12 * MIB), (33 * MIB, 34 * MIB)],
)  # fmt: skip
def test_segments_are_sized_like_get_allocation_size(size: int, segment: int) -> None:
    assert allocation_size(size, 20 * MIB) == segment
    allocator = Allocator()
    allocator.malloc(size)
    assert allocator.reserved == segment


def test_large_blocks_keep_up_to_one_mebibyte_of_slack() -> None:
    allocator = Allocator()
    allocator.malloc(11 * MIB)  # of a 12 MiB segment: exactly 1 MiB is left, too little to split
    assert (allocator.requested, allocator.allocated, allocator.inactive_split) == (11 * MIB, 12 * MIB, 0)
    allocator.malloc(11 * MIB - 512)
    assert (allocator.allocated, allocator.inactive_split) == (23 * MIB - 512, MIB + 512)


@pytest.mark.parametrize(("torch", "taken"), [((2, 11), 0), ((2, 12), 3), ((2, 13), 0)])
def test_equal_blocks_are_taken_by_address_or_by_registration(torch: tuple[int, int], taken: int) -> None:
    allocator = Allocator(torch=torch)
    quarters = [allocator.malloc(512 * KIB) for _ in range(4)]  # the last is what is left of the first Block object
    addresses = [block.addr for block in quarters if block is not None]
    allocator.free(quarters[0])
    allocator.free(quarters[3])
    block = allocator.malloc(512 * KIB)
    assert block is not None and block.addr == addresses[taken]


def test_best_fit_takes_the_smallest_block_that_suffices() -> None:
    allocator = Allocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 30, 20)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(30 * MIB) is blocks[1]


def test_streams_do_not_share_free_blocks() -> None:
    allocator = Allocator()
    allocator.free(allocator.malloc(4 * MIB, stream=7))
    allocator.malloc(4 * MIB, stream=0)
    assert allocator.segments == 2
    allocator.malloc(4 * MIB, stream=7)
    assert allocator.segments == 2


def test_a_block_used_on_other_streams_waits_until_the_next_malloc() -> None:
    allocator = Allocator()
    block = allocator.malloc(20 * MIB)
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 2)
    allocator.record_stream(block, 1)
    allocator.free(block)
    assert block is not None and block.state == PENDING
    stats = allocator.stats
    assert (stats.allocated, stats.active, stats.requested) == (0, 20 * MIB, 20 * MIB)
    assert allocator.malloc(20 * MIB) is block
    assert allocator.stats.active == allocator.stats.active_peak == allocator.reserved == 20 * MIB


def test_pending_bytes_stay_active_through_a_reset_of_the_peaks() -> None:
    allocator = Allocator()
    block = allocator.malloc(20 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.reset_peak_stats()
    stats = allocator.stats
    assert (stats.allocated_peak, stats.active_peak) == (0, 20 * MIB)
    allocator.empty_cache()
    assert (allocator.stats.active, allocator.reserved) == (0, 0)


def test_a_use_on_its_own_stream_does_not_delay_a_free() -> None:
    allocator = Allocator()
    block = allocator.malloc(4 * MIB, stream=3)
    allocator.record_stream(block, 3)
    allocator.free(block)
    assert allocator.stats.active == 0


def test_what_is_cached_is_given_back_before_memory_runs_out() -> None:
    allocator = Allocator(64 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(60 * MIB)
    assert (allocator.num_alloc_retries, allocator.num_ooms, allocator.reserved) == (1, 0, 60 * MIB)


def test_out_of_memory_carries_the_numbers_and_changes_nothing() -> None:
    allocator = Allocator(64 * MIB)
    allocator.malloc(31 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(33 * MIB + 1)
    error = caught.value
    assert (error.requested, error.tried) == (33 * MIB + 1, 34 * MIB)
    assert (error.device_total, error.device_free, error.allowed) == (64 * MIB, 32 * MIB, None)
    assert (error.allocated, error.reserved) == (32 * MIB, 32 * MIB)
    assert "Tried to allocate 34.0 MiB" in error.message and "32.0 MiB is free" in error.message
    assert (allocator.num_ooms, allocator.num_alloc_retries, allocator.allocated) == (1, 1, 32 * MIB)
    allocator.malloc(32 * MIB)
    assert allocator.reserved == 64 * MIB


@pytest.mark.parametrize(
    ("fraction", "torch", "allowed"),
    [
        (None, (2, 13), None),
        (1.0, (2, 13), None),
        (1.0, (2, 9), GIB),
        (0.5, (2, 13), GIB // 2),
        (0.5, (2, 6), GIB // 2),
    ],
)
def test_a_memory_fraction_limits_what_is_reserved(
    fraction: float | None, torch: tuple[int, int], allowed: int | None
) -> None:
    allocator = Allocator(GIB, AllocSettings(per_process_memory_fraction=fraction), torch)
    assert allocator.allowed == allowed
    if allowed == GIB // 2:
        with pytest.raises(OutOfMemory, match=r"512 MiB allowed"):
            allocator.malloc(600 * MIB)


def test_a_rejected_request_is_not_retried() -> None:
    allocator = Allocator(GIB, AllocSettings(throw_on_cudamalloc_oom=True))
    allocator.free(allocator.malloc(600 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.malloc(800 * MIB)
    assert (allocator.num_oom_rejections, allocator.num_alloc_retries, allocator.num_ooms) == (1, 0, 0)
    assert allocator.reserved == 600 * MIB


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    allocator = Allocator(settings=AllocSettings(max_split_size=64 * MIB))
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(32 * MIB)
    assert allocator.reserved == 132 * MIB
    block = allocator.malloc(90 * MIB)
    assert block is not None and block.size == 100 * MIB


def test_an_expandable_segment_grows_by_granules_and_shrinks_from_inside() -> None:
    allocator = Allocator(GIB, EXPANDABLE)
    small, large, top = allocator.malloc(512), allocator.malloc(30 * MIB), allocator.malloc(15 * MIB)
    assert allocator.reserved == 2 * MIB + 60 * MIB
    assert allocator.stats.segments == 0  # torch counts only what cudaMalloc gave
    allocator.free(large)
    allocator.empty_cache()  # the first granule is wholly free, the second reaches into `top`
    assert allocator.reserved == 2 * MIB + 40 * MIB
    allocator.free(top)
    allocator.free(small)
    allocator.empty_cache()
    assert (allocator.reserved, list(allocator.blocks())) == (0, [])


def test_expandable_segments_fit_where_fixed_ones_do_not() -> None:
    for settings, fits in ((PLAIN, False), (EXPANDABLE, True)):
        allocator = Allocator(300 * MIB, settings)
        blocks = [allocator.malloc(20 * MIB) for _ in range(10)]
        for block in blocks:
            allocator.free(block)
        allocator.malloc(12 * MIB)  # keeps one segment of the ten from going back
        try:
            allocator.malloc(285 * MIB)
        except OutOfMemory:
            assert not fits
        else:
            assert fits


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_is_no_block_and_less_is_an_error(size: int) -> None:
    allocator = Allocator()
    if size < 0:
        with pytest.raises(ValueError, match="-1 bytes"):
            allocator.malloc(size)
    else:
        assert allocator.malloc(size) is None
        allocator.free(None)
    assert allocator.stats == Allocator().stats


def test_a_double_free_is_an_error() -> None:
    allocator = Allocator()
    block = allocator.malloc(512)
    allocator.free(block)
    with pytest.raises(ValueError, match=r"free block of .* is not allocated"):
        allocator.free(block)


def test_peaks_can_be_reset() -> None:
    allocator = Allocator()
    allocator.malloc(3 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    assert allocator.stats.requested_peak == 53 * MIB
    allocator.reset_peak_stats()
    stats = allocator.stats
    assert (stats.requested_peak, stats.allocated_peak, stats.active_peak) == (3 * MIB,) * 3
    assert (stats.reserved_peak, stats.inactive_split_peak) == (stats.reserved, stats.inactive_split)


def test_another_backend_is_refused() -> None:
    with pytest.raises(Unsupported):
        Allocator(settings=parse_alloc_conf("backend:cudaMallocAsync"))
