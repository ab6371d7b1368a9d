# Score matrices fill the card in the first forward pass. There would have been room for one more in pieces, and no further.
# cause: attention · card: 768 MiB
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(256, 3 * 256), nn.Linear(256, 256)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.inner(x).view(batch, tokens, 3, 8, 32).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / 8.0
        later = torch.triu(torch.ones(tokens, tokens, device="cuda", dtype=torch.bool), 1)
        scores = scores.masked_fill(later, float("-inf")).softmax(-1)  # <-
        return self.outer((scores @ v).transpose(1, 2).reshape(batch, tokens, width))


model = nn.Sequential(*[Attention() for _ in range(4)]).cuda()
model(torch.randn(1, 2048, 256, device="cuda")).pow(2).mean().backward()
