"""What scripts ask of torch.cuda beside training."""

import torch
from torch.nn import functional

assert torch.cuda.is_available() and torch.cuda.device_count() == 1
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory >> 30, "GiB")
torch.set_default_device("cuda")
torch.set_float32_matmul_precision("high")
torch.backends.cuda.enable_flash_sdp(True)
torch.cuda.set_device(0)
torch.cuda.reset_peak_memory_stats()
generator = torch.Generator(device="cuda").manual_seed(3)

side = torch.cuda.Stream()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
with torch.cuda.stream(side):
    noise = torch.randn(1000, 100, generator=generator)
end.record()
torch.cuda.current_stream().wait_stream(side)
noise.record_stream(torch.cuda.current_stream())
torch.cuda.synchronize()
print("ms", start.elapsed_time(end))

weight = torch.nn.Parameter(torch.randn(100, 10, device="cuda"))
labels = torch.randint(0, 10, (1000,))
optimizer = torch.optim.Adam([weight], lr=1e-3)
for step in range(100):
    logits = noise @ weight
    mask = labels >= 0
    loss = functional.cross_entropy(logits[mask], labels[mask])
    if torch.isnan(loss) or torch.isinf(loss):
        raise SystemExit("the loss is not finite")
    loss.backward()
    grads = weight.grad.detach().float().cpu().numpy()
    if grads.max() > 1e6:
        weight.grad.zero_()
    optimizer.step()
    optimizer.zero_grad()
    top = logits.topk(3).indices
    print(
        step,
        round(float(loss), 3),
        logits[0].tolist()[:2],
        top.shape,
        (top == labels[:, None]).any(1).float().mean().item(),
    )
    with torch.random.fork_rng(devices=[0]):
        functional.dropout(logits, 0.5)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
print(torch.cuda.memory_summary(abbreviated=True)[:100])
