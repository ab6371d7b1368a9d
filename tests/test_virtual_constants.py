"""Large tensors that hold one number everywhere are known, without host memory for their elements."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from memfit.virtual.libraries import apex, third_party, triton  # noqa: E402
from memfit.virtual.virtual_gpu import virtual_gpu  # noqa: E402

N = 1 << 28  # elements: 1 GiB in fp32


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    with virtual_gpu("h100"):
        yield


def full(value: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((N // 1024, 1024), value, dtype=dtype, device="cuda")


KNOWN: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
    "zeros": (lambda: torch.zeros(N, device="cuda")[7], 0),
    "ones": (lambda: torch.ones(N, device="cuda", dtype=torch.bfloat16)[-1], 1),
    "full": (lambda: full()[5, 6], 3),
    "fill_": (lambda: torch.empty(N, device="cuda").fill_(2.5)[1], 2.5),
    "fill_ of a tensor": (lambda: torch.empty(N, device="cuda").fill_(torch.tensor(2.5))[1], 2.5),
    "like": (lambda: torch.full_like(torch.empty(N, device="cuda"), -1)[0], -1),
    "new": (lambda: torch.empty(1, device="cuda").new_ones(N)[3], 1),
    "integers": (lambda: torch.full((N,), 7, device="cuda")[3], 7),
    "arithmetic": (lambda: (full() * 2 + torch.ones((), device="cuda"))[0, 0], 7),
    "two constants": (lambda: (full() - full(1))[0, 0], 2),
    "in place": (lambda: full().mul_(4).sub_(2)[0, 0], 10),
    "conversion": (lambda: full(1 / 3).to(torch.bfloat16)[0, 0], float(torch.tensor(1 / 3, dtype=torch.bfloat16))),
    "conversion to small integers": (lambda: torch.ones(1 << 20, device="cuda").int()[5], 1),
    "clone of a view": (lambda: full().t().clone()[2, 1], 3),
    "reductions": (lambda: full().max() + full().mean() + full().amin(), 9),
    "sum": (lambda: full(0.5).sum(), N / 2),
    "sum of rows": (lambda: full(0.5).sum(1)[4], 512),
    "comparison": (lambda: (full() == 3).all(), True),
    "zero_": (lambda: full().zero_()[0, 0], 0),
    "same number into a part": (lambda: _part(3.0), 3),
}


def _part(value: float) -> torch.Tensor:
    x = full()
    x[:1000].fill_(value)
    return x[0, 0]


@pytest.mark.parametrize("name", KNOWN)
def test_a_constant_is_known_at_any_size(name: str) -> None:
    make, value = KNOWN[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert make().item() == value
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_map_in_floating_point_is_known_as_booleans_until_something_else_is_written() -> None:
    rows, columns = (torch.arange(n, device="cuda") for n in (2048, 4))
    made = torch.zeros(2048, 4, dtype=torch.bfloat16, device="cuda")
    made[rows, rows % 4] = 1
    assert made.bool().sum(0).tolist() == [512] * 4 and made.bool()[5].tolist() == [False, True, False, False]
    made.mul_(columns)
    assert made.bool().sum(0).tolist() == [0] * 4  # unknown


def test_a_copy_on_the_host_holds_the_number() -> None:
    assert torch.full((1024,), 3.0, device="cuda").cpu().sum().item() == 3072


def fused(x: torch.Tensor) -> None:
    weight, gradient, other = (torch.randn_like(x) for _ in range(3))
    step = torch.ones((), device="cuda")
    torch._fused_adamw_(
        [weight], [gradient], [x], [other], [], [step], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "another number into a part": lambda x: x[:1000].fill_(5.0),
    "into one element": lambda x: x[0, 0].add_(1),
    "an unknown tensor": lambda x: x.add_(torch.randn_like(x)),
    "random numbers": lambda x: x.normal_(),
    "a copy": lambda x: x.copy_(torch.randn_like(x)),
    "out": lambda x: torch.add(torch.randn_like(x), 1, out=x),
    "indices": lambda x: x.index_fill_(0, torch.tensor([0], device="cuda"), 9.0),
    "a kernel of Triton": lambda x: triton.Kernel(fused)[1,](x, 3),
    "a kernel that gets an address": lambda x: third_party.Kernels().step(x.data_ptr(), 3),
    "a kernel of apex": lambda x: apex._in_place(65536, torch.zeros(1, device="cuda"), [[x]]),
    "a list": lambda x: torch._foreach_add_([x], [torch.randn_like(x)]),
    "a fused optimizer": fused,
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_makes_it_unknown(name: str) -> None:
    x = full()
    WRITES[name](x)
    assert x[0, 0].item() == 1.0  # the default for unknown numbers


@pytest.mark.parametrize(
    "write", [lambda x: x.mul_(4), lambda x: x.clamp_(4.0, 5.0), lambda x: x.exp_(), lambda x: x.sub_(x)]
)
def test_what_is_unknown_stays_so_in_place(write: Callable[[torch.Tensor], object]) -> None:
    x = torch.empty((), device="cuda")
    write(x)
    assert x.item() == 1.0
