"""The gradients of a small network, computed lazily in the cluster, beside torch's own, computed here."""

import os

import torch

import loom

torch.manual_seed(0)
x, w1, w2 = (torch.randn(*size, dtype=torch.float64) for size in ((8, 5), (5, 7), (7, 3)))
labels = torch.randint(3, (8,))


def loss(functions, x, w1, w2, labels):
    """Compute the loss, with torch or with lazy tensors: the code is the same."""
    hidden = functions.tanh(x @ w1)
    attention = functions.softmax(hidden @ hidden.transpose(0, 1), -1)
    scores = (attention @ hidden + hidden.relu()) @ w2
    return functions.cross_entropy(scores, labels) + (w1 * w1).sum() * 0.01


theirs = [each.clone().requires_grad_() for each in (w1, w2)]
expected = loss(type("Torch", (), {**vars(torch), **vars(torch.nn.functional)}), x, *theirs, labels)
expected.backward()

with loom.connect() if "LOOM_URL" in os.environ else loom.local() as job:
    lt = job.tensors()
    ours = [lt.tensor(each, requires_grad=True) for each in (w1, w2)]
    found = loss(lt, lt.tensor(x), *ours, lt.tensor(labels))
    found.backward()
    gradients = [torch.tensor(each, dtype=torch.float64) for each in lt.fetch(*(each.grad for each in ours))]

    print(f"loss {found.item():.9f}, torch's {expected.item():.9f}")
    worst = max((one - other.grad).abs().max().item() for one, other in zip(gradients, theirs, strict=True))
    print(f"the largest difference of a gradient is {worst:.1e}")
raise SystemExit(0 if worst < 1e-12 else "the gradients differ")
