"""The selections of rtx as an attention implementation of Hugging Face `transformers`.

    import rtx.hf

    rtx.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rtx")
    rtx.hf.configure(model, selection="probed", window=64, keys=64, sinks=4)
    rtx.hf.fit(model, tokens)  # centroids: for the selections in rtx.hf.FITTED

Each head of the model then reads the last `window` positions, the first `sinks` positions, and at
most `keys` positions in between that a selection of rtx chooses. No weight of the model changes.
docs/pretrained.md explains it.

All logits are computed, and those that a head does not read are masked. So this shows what a
selection costs in loss and trains through it, but it saves no time.

    choice.py      the options, and the patterns of rtx that choose
    far_keys.py    one layer: which keys its heads read, from queries and keys
    hashed.py      hashing with separate queries and keys
    rotary.py      queries and keys before their rotary angles
    interface.py   the attention function that transformers calls

Names of tensors end with the letters of their dimensions, as in `rtx.attention`; here Q is the
queries of a call, K all keys so far, G key-value heads.
"""

from rtx.hf.choice import FITTED, NAMES, Choice
from rtx.hf.far_keys import FarKeys
from rtx.hf.interface import IMPLEMENTATION, configure, fit, register

__all__ = [
    "FITTED",
    "IMPLEMENTATION",
    "NAMES",
    "Choice",
    "FarKeys",
    "configure",
    "fit",
    "register",
]
