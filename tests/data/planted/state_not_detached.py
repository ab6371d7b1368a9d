# A recurrent state is never detached, and retain_graph keeps what it was made from.
# cause: leak · card: 64 MiB
cell = mlp()
state = torch.zeros(256, 256, device="cuda")
for _ in range(300):
    state = cell(torch.randn(256, 256, device="cuda") + state)  # <-
    state.pow(2).mean().backward(retain_graph=True)
