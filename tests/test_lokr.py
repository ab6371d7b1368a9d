"""LoKr of LyCORIS beside frozen linear layers of denoisers."""

from __future__ import annotations

import pytest

from conftest import Ran

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from memfit.errors import MemfitError  # noqa: E402
from memfit.virtual.jobs import lycoris  # noqa: E402


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = torch.nn.Linear(24, 36)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_q(x)


@pytest.mark.parametrize(("rank", "sizes"), [(1 << 16, [(4, 4), (9, 6)]), (2, [(4, 4), (2, 6), (9, 2)])])
def test_lokr_adds_a_kronecker_product_to_the_output(
    rank: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lycoris, "DEVICE", "cpu")
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(36, 8))
    model.requires_grad_(False)
    lycoris.adapt(model, ("Attention:4",), rank, torch.float32)
    (adapter,) = model.lycoris
    assert [tuple(p.shape) for p in adapter.parameters()] == sizes
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight)
    first, *large = (p.detach() for p in adapter.parameters())
    x, layer = torch.randn(3, 24), model[0].to_q
    delta = torch.kron(first, large[0] if len(large) == 1 else large[1] @ large[0])
    expected = torch.nn.functional.linear(x, layer.weight + delta, layer.bias)
    assert torch.allclose(model[0](x), expected, atol=1e-4)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"lycoris.0.{n}" for n, _ in adapter.named_parameters()
    }


@pytest.mark.parametrize("classes", [("FeedForward:4",), ("Attention:0",), ("Attention:four",)])
def test_classes_that_a_model_lacks_and_factors_that_are_none_are_refused(classes: tuple[str, ...]) -> None:
    with pytest.raises(MemfitError) as error:
        lycoris.adapt(torch.nn.Sequential(Attention()), classes, 4, torch.float32)
    assert "--lora-targets" in str(error.value.hint)


def test_other_adapters_of_denoisers_are_refused(ran: Ran) -> None:
    pytest.importorskip("diffusers")
    code, _, err = ran("trace", "qwen-image", "--gpu", "h100", "--adapter", "dora")
    assert code == 2 and "--adapter lora" in err
