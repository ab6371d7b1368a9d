# The checkpoint that training resumed from is still on the card.
# cause: stale-checkpoint · card: 64 MiB
checkpoint = {k: v.clone() for k, v in mlp(1024, 6).state_dict().items()}  # <-
model = mlp(1024, 6)
model.load_state_dict(checkpoint)
model(torch.randn(1024, 1024, device="cuda")).pow(2).mean().backward()
