# Not even the weights fit.
# cause: capacity · card: 64 MiB
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(60)])
model.to("cuda", dtype=torch.bfloat16)  # <-
