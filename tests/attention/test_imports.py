"""`import rtx.attention` is for users of an attention module: it brings torch, and nothing of experiments."""

from __future__ import annotations

import json
import subprocess
import sys

FOREIGN = ("lightning", "pytorch_lightning", "hydra", "omegaconf", "datasets", "wandb", "pyarrow", "sentencepiece")
PROGRAM = """
import json, sys
import torch
import rtx.attention

q, k, v = torch.randn(3, 1, 2, 9, 4)
centroids = rtx.attention.Centroids(2, 3, 4, window=4, length=9, decay=0.9, thresholds=True)
heads = rtx.attention.RoutingHeads(centroids, selection="causal", scale=0.5)
out, loss = heads(q, None, v)
rtx.attention.update_centroids(heads)
rtx.attention.LocalHeads(window=3)(q, k, v)
state = heads.eval().start()
state.fill(q, None, v)
state.step(q[:, :, 0], None, v[:, :, 0], 9)
rtx.attention.fixed(q, k, v, block=4, summary=2, backend="reference")
print(json.dumps(sorted(sys.modules)))
"""


def test_attention_alone_imports_no_experiments() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    modules = json.loads(done.stdout)
    assert "rtx.attention.routing" in modules
    assert not [name for name in modules if name.split(".")[0] in FOREIGN]
    ours = {name.split(".")[1] for name in modules if name.startswith("rtx.")}
    # compiler.py knows whether torch.compile can work, for backend="flex"; it reads nothing of a configuration.
    assert ours <= {"attention", "compiler"}
