# Two nets that are alike are compared, both on the card: the second does not come to its end.
# cause: two-copies · card: 150 MiB
def load(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))  # <-
    return net.cuda().eval()


before = load(0)
after = load(1)
with torch.no_grad():
    x = torch.randn(8, 1024, device="cuda")
    print((before(x) - after(x)).abs().max())
