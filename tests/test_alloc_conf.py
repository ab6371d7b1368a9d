"""PYTORCH_ALLOC_CONF strings: read as torch reads them, refused where torch refuses them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import BadInput, MemfitError
from memfit.nouns.alloc_settings import NO_ROUNDUP, AllocSettings, parse_alloc_conf
from memfit.units import MIB


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("max_split_size_mb:20", {"max_split_size": 20 * MIB}),
        (" max_split_size_mb : 64 , expandable_segments : False ,", {"max_split_size": 64 * MIB}),
        ("max_split_size_mb:32,max_split_size_mb:64", {"max_split_size": 64 * MIB}),
        ("garbage_collection_threshold:0.6", {"garbage_collection_threshold": 0.6}),
        ("per_process_memory_fraction:0.5", {"per_process_memory_fraction": 0.5}),
        ("large_segment_size_mb:40", {"large_segment_size": 40 * MIB, "max_non_split_rounding": 40 * MIB}),
        ("max_non_split_rounding_mb:50,large_segment_size_mb:40",
         {"large_segment_size": 40 * MIB, "max_non_split_rounding": 50 * MIB}),
        ("throw_on_cudamalloc_oom:True", {"throw_on_cudamalloc_oom": True}),
        ("backend:cudaMallocAsync", {"backend": "cudaMallocAsync"}),
        ("pinned_use_background_threads:True,pinned_num_register_threads:8,release_lock_on_cudamalloc:True", {}),
    ],
)  # fmt: skip
def test_settings_are_read(text: str, fields: dict[str, Any]) -> None:
    assert parse_alloc_conf(text) == AllocSettings(**fields)


# The tables are those torch 2.13 builds from the same strings.
@pytest.mark.parametrize(
    ("value", "table"),
    [
        ("4", [4] * 16),
        ("[]", [0] * 16),
        ("[1:8,16:4,64:2,>:1]", [8, 0, 0, 0, 4, 0, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("[64:8,256:4,1024:4,>:1]", [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1]),
        ("[>:4]", [0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        ("[256:2,1:4]", [4, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0]),
        ("[64:8,>:4,512:2]", [8, 8, 8, 8, 8, 8, 8, 4, 4, 2, 4, 4, 4, 4, 4, 4]),
        ("[65536:8]", [8] * 16),
    ],
)
def test_roundup_divisions_become_a_table_per_power_of_two(value: str, table: list[int]) -> None:
    assert parse_alloc_conf(f"roundup_power2_divisions:{value}").roundup_power2_divisions == tuple(table)


def test_before_2_9_the_rest_was_filled_from_the_last_key_on() -> None:
    text = "roundup_power2_divisions:[1:8,16:4,>:1]"
    assert parse_alloc_conf(text, (2, 6)).roundup_power2_divisions[4] == 1
    assert parse_alloc_conf(text, (2, 9)).roundup_power2_divisions[4] == 4


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19", "max_split_size_mb:39,large_segment_size_mb:40", "max_non_split_rounding_mb:1",
        "large_segment_size_mb:10", "large_segment_size_mb:0", "max_split_size_mb", "max_split_size_mb:",
        "max_split_size_mb:abc", "max_split_size_mb:-1", "max_split_size_mb:6.5", "max_split_size_mb=64", ":", "[", ",",
        "expandable_segments:true", "expandable_segments:1", "garbage_collection_threshold:0",
        "garbage_collection_threshold:1.0", "garbage_collection_threshold:x", "garbage_collection_threshold:nan",
        "per_process_memory_fraction:1.1", "per_process_memory_fraction:nan", "roundup_power2_divisions:3",
        "roundup_power2_divisions:0", "roundup_power2_divisions:[3:4]", "roundup_power2_divisions:[0:4]",
        "roundup_power2_divisions:[1:3]", "roundup_power2_divisions:[4]", "roundup_power2_divisions:[1:4", "backend:x",
        "max_split_size_mb:64;expandable_segments:True", "max_split_size_mb:9999999999999999999", "foo:1",
    ],
)  # fmt: skip
def test_what_torch_refuses_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_alloc_conf(text)
    assert caught.value.message and caught.value.hint


def test_a_misspelt_key_is_answered_with_the_right_one() -> None:
    with pytest.raises(BadInput) as caught:
        parse_alloc_conf("expandable_segment:True")
    assert "expandable_segments" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("large_segment_size_mb:40", (2, 11)), ("per_process_memory_fraction:0.5", (2, 10)),
        ("throw_on_cudamalloc_oom:True", (2, 12)), ("graph_capture_record_stream_reuse:True", (2, 9)),
        ("pinned_max_cached_size_mb:4", (2, 13)), ("pinned_reserve_segment_size_mb:4", (2, 10)),
    ],
)  # fmt: skip
def test_a_key_newer_than_torch_is_refused(text: str, since: tuple[int, int]) -> None:
    parse_alloc_conf(text, since)
    with pytest.raises(BadInput, match=text.partition(":")[0]) as caught:
        parse_alloc_conf(text, (since[0], since[1] - 1))
    assert f"torch {since[0]}.{since[1]} or newer" in caught.value.hint


@given(st.text(alphabet="[]:,>0123456789. abcdefghijklmnopqrstuvwxyz_TrueFals", max_size=60))
def test_no_text_gives_a_traceback(text: str) -> None:
    try:
        settings = parse_alloc_conf(text)
    except MemfitError:
        return
    assert settings == AllocSettings() and settings.roundup_power2_divisions == NO_ROUNDUP
