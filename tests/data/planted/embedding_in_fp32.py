# A 16-bit model whose embedding was cast to 32 bits.
# cause: kbit-upcast · card: 96 MiB
body = mlp(1024, 8, dtype=torch.bfloat16)
embedding = nn.Embedding(8000, 1024).cuda().float()
model = nn.ModuleDict({"embedding": embedding, "body": body})  # <-
ids = torch.zeros(16, 256, dtype=torch.long, device="cuda")
hidden = embedding(ids).to(torch.bfloat16)
out = body(hidden).float().sum()
out.backward()
