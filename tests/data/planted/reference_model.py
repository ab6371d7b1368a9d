# A frozen reference beside the policy.
# cause: reference-model · card: 64 MiB
policy = mlp(1024, 6)
reference = mlp(1024, 6)  # <-
policy(torch.randn(1024, 1024, device="cuda")).pow(2).mean().backward()
