"""Attributes replaced for a while, and what is there afterwards."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from memfit.virtual.patching import patched


class Base:
    @classmethod
    def name(cls) -> str:
        return cls.__name__


class Child(Base):
    pass


def test_a_class_method_binds_to_subclasses_again() -> None:
    with patched(Base, {"name": classmethod(lambda cls: "replaced")}):
        assert Child.name() == "replaced"
    assert (Base.name(), Child.name()) == ("Base", "Child")


def test_what_was_inherited_is_inherited_again() -> None:
    with patched(Child, {"name": classmethod(lambda cls: "replaced")}):
        assert (Base.name(), Child.name()) == ("Base", "replaced")
    assert "name" not in vars(Child)


def test_what_was_not_there_is_gone() -> None:
    with patched(Child, {"fresh": 1}):
        assert Child.fresh == 1  # type: ignore[attr-defined]
    assert not hasattr(Child, "fresh")
