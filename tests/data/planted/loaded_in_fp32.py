# Weights in 32 bits; in 16 they would have room.
# cause: wrong-dtype · card: 64 MiB
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(20)])
model.cuda()  # <-
