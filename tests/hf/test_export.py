"""`rtx export format=hf`: `transformers` loads the folder, scores and generates as rtx does."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_runs import ROOT, Workshop

pytest.importorskip("transformers", reason="the extra rtx[hf] is not installed")

PROMPTS = ["ab c", "", "b\n"]
KINDS = {
    "causal": ("routing=causal",),
    "learned": ("routing=topk", "model.positions=learned", "model.tie_embeddings=true"),
    "drawn": ("routing=random", "hardware.precision=fp64"),
    "words": ("routing=nearest", "data.tokenizer=words"),
    "subwords": ("routing=probed", "data.tokenizer=sentencepiece", "data.vocabulary=300"),
}

SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, text, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
load = {"trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(folder, **load).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, **load)

def generate(*texts, **options):
    words = {"input_ids": torch.tensor([[tokenizer.bos_token_id]])}
    if texts != ("",):
        words = tokenizer(list(texts), return_tensors="pt", padding=True)
    tokens = model.generate(**words, max_new_tokens=20, do_sample=False, **options)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)

ids = tokenizer(text, add_special_tokens=False).input_ids
start = tokenizer.bos_token_id
windows = torch.tensor(ids[: len(ids) // 24 * 24]).view(-1, 24)
begun = torch.cat([torch.full_like(windows[:, :1], start), windows], 1)
with torch.no_grad():
    scored = model(begun, labels=begun)
    unbegun = model(windows)
# As lm-evaluation-harness does: rows padded on the right, log-likelihoods of continuations.
row = torch.nn.functional.pad(windows[:1, :9], (0, 7))
with torch.no_grad():
    shares = model(row).logits[0, 3:8].log_softmax(-1)
continuation = shares.gather(1, windows[0, 4:9, None]).sum()
beams = generate(prompts[0], num_beams=2, use_cache=False)
try:
    generate(prompts[0], num_beams=2)
    refused = ""
except ValueError as error:
    refused = str(error)
model.save_pretrained(folder + "-again")
again = AutoModelForCausalLM.from_pretrained(folder + "-again", **load)
with torch.no_grad():
    is_same = torch.equal(again(begun).logits, scored.logits)
print(json.dumps({
    "ids": ids,
    "windows": windows.tolist(),
    "nats": float(scored.loss),
    "continuation": float(continuation),
    "unbegun": float((unbegun.logits - scored.logits[:, 1:]).nan_to_num().abs().max()),
    "texts": [generate(prompt)[0] for prompt in prompts],
    "uncached": [generate(prompt, use_cache=False)[0] for prompt in prompts],
    "batch": generate(*prompts),
    "beams": len(beams),
    "refused": refused,
    "same": is_same,
    "special": tokenizer(tokenizer.bos_token, add_special_tokens=False).input_ids,
}))
"""


def in_transformers(folder: Path, text: str, prompts: list[str]) -> dict[str, Any]:
    """Return what `SCRIPT` prints, run in a process of its own without a network."""
    offline = {"HF_HOME": str(folder.parent / "hf_home"), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **offline, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(folder), text, json.dumps(prompts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_scores_and_generates_as_rtx(workshop: Workshop, kind: str) -> None:
    import torch

    from rtx import load
    from rtx.data.tokenizers import encode_text

    words = ("".join(letters) for letters in itertools.product("abcdef", repeat=3))
    (workshop.folder / "book.txt").write_text("a bc cab\n" + " ".join(words) * 4)
    run = workshop.train(kind, *KINDS[kind], "trainer.steps=3", "trainer.val_every=3")
    said = workshop.command("export", str(run), "format=hf")
    assert "config.json" in said and "modeling_rtx.py" in said
    folder = run / "hf"
    assert not [path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".ckpt")]
    ours = load(folder)
    text = "abc b\né <|start|> ab ca" * 12
    theirs = in_transformers(folder, text, PROMPTS)
    assert theirs["ids"] == encode_text(ours.tokenizer, text).tolist()
    assert ours.model.vocabulary not in theirs["special"]
    tokens_BN = torch.tensor(theirs["windows"])
    with torch.no_grad():
        nats_BN, _ = ours.model.loss(tokens_BN, streaming=True)
    assert theirs["nats"] == pytest.approx(float(nats_BN.mean()), abs=1e-6)
    assert theirs["continuation"] == pytest.approx(-float(nats_BN[0, 4:9].sum()), abs=1e-5)
    assert theirs["unbegun"] < 1e-5
    expected = [ours.sample(20, prompt, temperature=0) for prompt in PROMPTS]
    assert theirs["texts"] == theirs["uncached"] == theirs["batch"] == expected
    sampled, _ = workshop.answer(
        "sample", str(run), "length=20", "temperature=0", f"prompt={PROMPTS[0]}"
    )
    assert sampled == "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd"
        for character in expected[0] + "\n"
    )
    assert theirs["beams"] == 1 and "use_cache=False" in theirs["refused"] and theirs["same"]


def test_scores_of_a_split_are_those_of_eval(workshop: Workshop) -> None:
    import torch

    from rtx import load
    from rtx.data.catalog import open_data
    from rtx.data.windows import windows
    from rtx.training.modeling_rtx import RtxForCausalLM

    run = workshop.train("scored", "routing=causal", "trainer.steps=3", "trainer.val_every=3")
    workshop.command("export", str(run), "format=hf", f"output={workshop.folder / 'model'}")
    folder = workshop.folder / "model"
    of_run, _ = workshop.score(run, "split=test")
    of_export, _ = workshop.score(folder, "split=test")
    assert of_run["bits"] == of_export["bits"]
    tokens = open_data(load(run).config.data, workshop.data).split("test").tolist()
    assert of_run["units"] == len(tokens)
    model = RtxForCausalLM.from_pretrained(folder)
    start = model.config.bos_token_id
    nats = 0.0
    for window in windows(len(tokens), 32):
        row = torch.tensor([[start, *tokens[window.start : window.stop]]])
        labels = row.clone()
        # The last window begins earlier than the tokens that it scores.
        labels[0, : 1 + window.first - window.start] = -100
        with torch.no_grad():
            nats += float(model(row, labels=labels).loss) * (window.stop - window.first)
    assert nats / len(tokens) == pytest.approx(of_run["nats"] / len(tokens), abs=1e-6)
    assert "AutoModelForCausalLM" in (folder / "README.md").read_text()
    workshop.command("export", str(run), f"output={folder}")
    assert not (folder / "config.json").exists()


def test_an_encoder_is_refused(workshop: Workshop) -> None:
    from tests.commands.test_encoder_runs import MASKED

    run = workshop.folder / "encoder"
    workshop.command("train", *MASKED, "routing=topk", "trainer.steps=3", run=run)
    said = workshop.command("export", str(run), "format=hf", code=2)
    assert "format=hf is not for model.causal=false" in said
