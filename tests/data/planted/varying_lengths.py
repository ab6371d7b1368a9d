# Long batches leave segments that short ones cut up: holes between what stays.
# cause: fragmentation · card: 1024 MiB
keep = []
for _ in range(25):
    long = torch.empty(40 << 18, device="cuda")
    del long
    keep.append(torch.empty(21 << 18, device="cuda"))
block = torch.empty(100 << 18, device="cuda")  # <-
