# Score matrices of 2048 x 2048.
# cause: attention · card: 96 MiB
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 8
        weights = torch.softmax(scores, dim=-1)  # <-
        return weights @ v


model = nn.Sequential(Attention(), Attention()).cuda()
model(torch.randn(1, 2048, 64, device="cuda")).pow(2).mean().backward()
