# The closure of a hook keeps every output; no variable of the program names it.
# cause: leak · card: 64 MiB
def watch(module):
    store = []
    module.register_forward_hook(lambda m, i, o: store.append(o.detach()))  # <-


model = mlp()
watch(model[0])
for _ in range(500):
    model(torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
    model.zero_grad()
