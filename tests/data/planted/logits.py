# A vocabulary of 32,000 in the loss.
# cause: logits · card: 240 MiB
body = mlp(128, 2)
head = nn.Linear(128, 32000, bias=False).cuda()
x = torch.randn(1024, 128, device="cuda")
logits = head(body(x))
labels = torch.zeros(1024, dtype=torch.long, device="cuda")
loss = F.cross_entropy(logits.float(), labels)  # <-
loss.backward()
